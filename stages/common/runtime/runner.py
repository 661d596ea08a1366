"""The runner, one for all stages: plan → find → lease → make → commit.

Whether to force, to share, to go on, or to answer "already done" is decided here. What is finished
is found in this process, in milliseconds; otherwise the stage runs in a child process of its own,
so that its memory and its device are free when it ends, and it ends with whoever called.

    call = Call("generate", config, store.path, {"prompts": "a/prompts@1", "policy": "a/policy@0"})
    outcome = run_call(call)    # what is finished, or made now in a child process
    outcome = find(call)        # only a look; None where it is not finished

    run_stage("generate", config, store, prompts="a/prompts@1", policy="a/policy@0")    # run_call
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from quiver.schemas.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    from_dict,
    printable,
)
from quiver.schemas.refs import Ref
from quiver.stages.common.config import Config
from quiver.stages.common.store import Store, Version
from quiver.stages.common.store.failpoints import failpoint
from quiver.stages.common.store.writer import open_staging

from .prewarm import ask
from .stage import Plan, load, plan_call

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What to run: a stage, its config as plain JSON, the store, and references by role."""

    stage: str
    config: dict[str, Any]
    store: Path | str
    refs: dict[str, str | list[str]] = field(default_factory=dict)
    into: str | None = None
    """Run that the new version belongs to. None: that of its inputs."""
    force: bool = False
    """Do it anew, even where a finished version exists."""
    share: bool = False
    """Any number of equal calls, on any hosts that see the store, do the work together, and each
    returns the version. A call that fails leaves its shards to the others."""

    def to_json(self) -> dict[str, Any]:
        """As a child process reads it, with the version of this program."""
        return {**asdict(self), "store": str(self.store), "quiver": quiver_version()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Call:
        """The call that `to_json` wrote. ConfigError where another version of this program did."""
        fields = dict(fields)
        require_version(sys.executable, quiver_version(), fields.pop("quiver", None))
        return cls(**fields)


@dataclass(frozen=True)
class Outcome:
    """What came of a call. `rows` and `metrics` are the manifest's. `cached`: it was there already,
    and `seconds` are the manifest's too."""

    ref: str
    cached: bool
    rows: int
    seconds: float
    metrics: dict[str, Any]


def plan_of(call: Call, store: Store | None = None) -> Plan:
    """The call's plan, by its stage. ConfigError, LineageError, SchemaError."""
    return plan_call(call.stage, call.config, store or Store(call.store), call.refs, call.into)


def find(call: Call, *, expired: bool = False) -> Outcome | None:
    """The finished version that the call asks for; None where it is to be made, or forced.

    `expired`: one whose files expired is an answer too, and so are the call's references.
    """
    if call.force:
        return None
    store = Store(call.store)
    plan = plan_of(call, store.with_expired() if expired else store)
    version = find_version(plan)
    return _outcome(version, plan) if version else None


def find_version(plan: Plan) -> Version | None:
    """The finished version that answers the plan. ConflictError if another one has the only number
    that it may have; and what the stage's `accept` raises."""
    version = plan.already_made or plan.store.find(plan.run, plan.kinds[-1], plan.run_key)
    if version is None:
        if plan.only_number in plan.store.numbers(plan.run, plan.kinds[-1]):
            raise ConflictError(
                f"{plan.name}@{plan.only_number}",
                plan.if_number_taken,
                next="choose another name for the run",
            )
    elif accept := getattr(load(plan.stage), "accept", None):
        accept(plan, version)
    return version


def perform(call: Call, store: Store | None = None) -> Outcome:
    """Find the version or make it, in this process. Raises what the stage raises.

    `store`: the call's store, where it is open already; its `written` then says what was made.
    """
    started_at = time.monotonic()
    plan = plan_of(call, store)
    version = None if call.force else find_version(plan)
    if version is None:
        version = make(plan, force=call.force, share=call.share)
    return _outcome(version, plan, time.monotonic() - started_at)


def make(plan: Plan, *, force: bool = False, share: bool = False) -> Version:
    """Make the version of the plan, which was not found; the one that is there in the end.

    Under `torch.distributed` every rank calls this; the first one writes and publishes, and the
    others take part in the stage's work without writers.
    """
    stage = load(plan.stage)
    if share and not getattr(stage, "SHARED", False):
        raise ConfigError(
            f"stage {plan.stage}",
            "its work cannot be shared among processes",
            next="start it once, without share",
        )
    if force:  # it stands beside what is there already
        plan = replace(plan, only_number=None)
    if os.environ.get("RANK", "0") != "0":
        if not getattr(stage, "RANKS", False):
            raise ConfigError(
                f"stage {plan.stage}",
                "its work cannot be shared among ranks",
                next="start it once, without RANK in the environment",
            )
        return _make_without_writers(stage, plan, force)
    with open_staging(plan, force=force, share=share) as staging:
        if staging.committed is None:
            stage.make(plan, staging.writers)
            staging.publish()
    return staging.committed


def _make_without_writers(stage: Any, plan: Plan, force: bool) -> Version:
    """What a rank does that does not write: its part of the work, then wait for the version; a
    forced one is above all that are there."""
    kind = plan.kinds[-1]
    numbers = plan.store.numbers(plan.run, kind) if force else []
    stage.make(plan, {})
    while True:
        version = plan.store.find(plan.run, kind, plan.run_key, max([-1, *numbers]))
        if version is not None:
            return version
        time.sleep(0.1)  # the rank that writes is publishing; if it fails, the launcher ends us all


def _outcome(version: Version, plan: Plan, seconds: float = 0.0) -> Outcome:
    manifest = version.manifest
    is_cached = str(version.ref) not in plan.store.written
    if is_cached:
        seconds = manifest.seconds.get("total", 0.0)
    return Outcome(str(version.ref), is_cached, manifest.rows, round(seconds, 3), manifest.metrics)


def run_call(
    call: Call,
    *,
    python: str | None = None,
    timeout: float | None = None,
    online: bool = False,
    on_line: Callable[[str], None] = log.info,
    env: Mapping[str, str] | None = None,
    stay: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Find the finished version, or run the stage in a child process and wait for it.

    Raises what the stage raised; ResourceError when the child died or took too long.

    Args:
        call: What to run.
        python: The child's interpreter. None: this one's.
        timeout: Most seconds that it may take.
        online: Whether it may reach a model hub.
        on_line: Is given each line that the child prints.
        env: Put over the child's environment.
        stay: The child may wait for the next such call, with an engine asleep.
        stopped: As soon as it is true (another thread's wish) the child is ended: Stopped.
    """
    started_at = time.monotonic()
    outcome = find(call)
    if outcome is not None:
        return outcome
    answer = ask(
        call.stage,
        call.to_json(),
        python=python,
        online=online,
        env=env,
        stay=stay,
        on_line=on_line,
        timeout=timeout,
        stopped=stopped,
    )
    # before its error: a child of another version refuses the call, or misreads it
    require_version(python or sys.executable, answer.pop("quiver", None), quiver_version())
    if "error" in answer:
        raise from_dict(answer["error"])
    failpoint("flow.answered")
    return Outcome(**{**answer, "seconds": round(time.monotonic() - started_at, 3)})


def run_stage(
    stage: str,
    config: Config | Mapping[str, Any],
    store: Store | str | os.PathLike[str],
    *,
    into: str | None = None,
    force: bool = False,
    share: bool = False,
    in_process: bool = False,
    **refs: str | Ref | list[str],
) -> Ref:
    """Run one stage on saved versions; the reference of what is there then. BusyError where another
    process is at this very work, and they do not share it.

    Args:
        stage: Its name.
        config: Its `Config`, or the same as a dict.
        store: The store, or its folder.
        into: Run that the new version belongs to. None: that of its inputs.
        force: Do it anew, even where a finished version exists.
        share: Do it together with the other processes that make the same call.
        in_process: In this process instead of a child.
        refs: References by role, such as `rollouts="arith/rollouts@3"`.
    """
    opened = store if isinstance(store, Store) else Store(store)
    fields = config.model_dump(mode="json") if isinstance(config, Config) else dict(config)
    texts = {
        role: [str(one) for one in ref] if isinstance(ref, list) else str(ref)
        for role, ref in refs.items()
        if ref is not None
    }
    call = Call(stage, fields, opened.path, texts, into, force, share)
    try:
        outcome = perform(call, opened) if in_process else run_call(call)
    except BusyError as error:
        if getattr(load(stage), "SHARED", False) and not force and not share:
            error.next += "; or make all these calls with share=True, and they do it together"
        raise
    return opened.resolve(outcome.ref)


@cache
def quiver_version() -> str:
    """Version of this program."""
    return metadata.version("quiver-rl")


def require_version(python: str, version: str | None, expected: str | None) -> None:
    """ConfigError unless interpreter `python`, which has `version` of this program for a stage,
    has the version of whoever calls it."""
    if version != expected:
        raise ConfigError(
            f"interpreter {python}",
            f"has Quiver {printable(version)}, expected {printable(expected)}",
            next="install the same version in both environments",
        )
