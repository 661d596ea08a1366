"""A stage as a child process, its log streamed; what is done already is found in this process, in
milliseconds.

Otherwise `python -m quiver.stages NAME` runs it: memory and the GPU are free when it ends, and it
ends with its caller (`child`).

    outcome = run_stage(Call("generate", config, store.path, refs={"prompts": "a/prompts@1",
    "policy": "a/policy@0"}))
"""

from __future__ import annotations

import inspect
import logging
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, ResourceError, from_dict, printable
from quiver.schemas.refs import Ref

from .child import Child, follow
from .config import parse
from .early import taken
from .store import Store
from .work import LookupOnly, NotDone

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What to run: the stage, its config as plain JSON, the store, and the references (one, or
    several) by the names that `run` gives them. `share`: any number of equal calls, on any hosts
    that see the store, do the work together, and each returns the version; a call that fails leaves
    its part to the others, so the work is done as soon as one of them returns."""

    stage: str
    config: dict[str, Any]
    store: Path | str
    refs: dict[str, str | list[str]] = field(default_factory=dict)
    into: str | None = None
    force: bool = False
    share: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of it. `cached`: the version was there already. `rows` and `metrics` are the
    manifest's, `seconds` this call's."""

    ref: str
    cached: bool
    rows: int
    seconds: float
    metrics: dict[str, Any]


def perform(call: Call, *, lookup: bool = False) -> Outcome:
    """Run the stage in this process. With `lookup`, only find a finished version: NotDone when
    there is none."""
    from quiver.stages import load

    config_class, run = load(call.stage)
    started = time.monotonic()
    config = parse(config_class, call.config, f"stage {call.stage}")
    store = LookupOnly(call.store) if lookup else Store(call.store)
    ref: Ref = run(
        config, store, **call.refs, into=call.into, force=call.force, **_sharing(call, run)
    )
    manifest = store.open(ref).manifest
    cached = str(ref) not in store.written
    seconds = round(time.monotonic() - started, 3)
    return Outcome(str(ref), cached, manifest.rows, seconds, manifest.metrics)


def _sharing(call: Call, run: Callable[..., Ref]) -> dict[str, bool]:
    if call.share and "share" not in inspect.signature(run).parameters:
        raise ConfigError(
            f"stage {call.stage}",
            "its work can not be shared among processes",
            next="start it once, without share",
        )
    return {"share": True} if call.share else {}


def run_stage(
    call: Call,
    *,
    python: str | None = None,
    timeout: float | None = None,
    online: bool = False,
    on_line: Callable[[str], None] = log.info,
    env: Mapping[str, str] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Find the finished version, or run the stage in a child (interpreter `python`, at most
    `timeout` seconds) and wait for it.

    Raises what the stage raised; ResourceError when the child died or took too long. `online` lets
    it reach a model hub, `env` is put over the child's environment. As soon as `stopped()` is true
    (another thread's wish) the child is ended: Stopped.
    """
    started = time.monotonic()
    if not call.force:
        try:
            return perform(call, lookup=True)
        except NotDone:
            pass
    early = (
        None if env else taken(call.stage, python, online)
    )  # CUDA may have looked already at what devices it may see
    with early or Child(call.stage, python, online, env) as child:
        child.tell({**call.__dict__, "store": str(call.store)})
        code, last = follow(child.process, call.stage, on_line, timeout, stopped)
        answer = child.answer()
    if answer is None:
        raise ResourceError(
            f"stage {call.stage}",
            f"its process ended {_how(code)} without an answer; last words: "
            f"{printable(' / '.join(last[::-1]))}",
            state="finished shards and all versions are kept.",
            next="run the same command again; it goes on where this one stopped",
        )
    if "error" in answer:
        raise from_dict(answer["error"])
    return Outcome(**{**answer, "seconds": round(time.monotonic() - started, 3)})


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{hint}"
