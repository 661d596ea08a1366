"""Where a stage runs: a child process of this one, or the workers of a Prefect work pool, as the
recipe's [placement] says.

What is done already is found in this process in either case, in milliseconds. Refused before
anything runs: a pool where no server is named, and a store by a relative path, which another host
would look for elsewhere.

    outcome = place(recipe, Call("generate", …), "arith · generate 1/3")
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from quiver.schemas.errors import BusyError, ConfigError, ResourceError
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.prewarm import prewarm
from quiver.stages.common.runtime.runner import Call, Outcome, find, run_call
from quiver.stages.common.runtime.subprocesses import Stopped

from .recipe import Recipe
from .slots import slots

SHARED = ("generate", "reward", "logprobs")
"""Stages that any number of workers do together, shard by shard."""
POLL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0  # each try in a pool is a run of its own on the server
log = logging.getLogger("quiver")


class GivenUp(ResourceError):
    """Nobody took the stage up, or somebody ended it: to try again by itself would not help."""


class NextStage(NamedTuple):
    """A stage that comes next, in a child process of this one."""

    stage: str
    config: dict[str, Any]
    python: str | None
    online: bool


@dataclass(frozen=True)
class Place:
    """What [placement] says of one stage."""

    pool: str | None = None
    workers: int | None = 1
    wait_seconds: float = 600
    python: str | None = None
    timeout_seconds: float | None = None
    online: bool = False
    slots: int = 0
    limit: str | None = None
    prewarmed: tuple[NextStage, ...] = ()
    """Whose processes are started with this one's: they import on a core that this one leaves idle
    as it starts."""


def place_of(recipe: Recipe, stage: str) -> Place:
    """Where `stage` of this recipe runs. `workers` is None for as many as the pool has online."""
    said = recipe.placement
    return Place(
        pool=said.pools.get(stage),
        workers=said.fan_out if stage in SHARED else 1,
        wait_seconds=said.wait_seconds,
        python=said.python.get(stage),
        timeout_seconds=said.timeout_seconds.get(stage),
        online=recipe.online,
        slots=said.slots,
        limit=said.limits.get(stage),
    )


def next_stages(recipe: Recipe, configs: Mapping[str, Config]) -> tuple[NextStage, ...]:
    """Those of the stages that come next which will run in a child process of this one."""
    stages = []
    for stage, config in configs.items():
        where = place_of(recipe, stage)
        if not where.pool:
            fields = config.model_dump(mode="json")
            stages.append(NextStage(stage, fields, where.python, where.online))
    return tuple(stages)


def check_placement(recipe: Recipe) -> None:
    """ConfigError where a pool is named that can not be reached from here, or could not see the
    store."""
    pools = recipe.placement.pools
    if not pools:
        return
    stage, pool = next(iter(pools.items()))
    require_server(f"placement.{stage} {pool}")
    if not Path(recipe.store).expanduser().is_absolute():
        raise ConfigError(
            "store",
            f"{recipe.store!r} is a relative path, and placement.{stage} = {pool!r} runs on hosts "
            "that have other folders",
            next="mount the store at the same path everywhere, e.g. --set "
            f"store={str(Path(recipe.store).absolute())!r}",
        )


def require_server(name: str) -> None:
    """ConfigError unless a Prefect server is named: the one that comes with a run has no pools."""
    from prefect.settings import PREFECT_API_URL

    if not PREFECT_API_URL.value():
        raise ConfigError(
            name,
            "a work pool needs a Prefect server, and PREFECT_API_URL names none",
            next="prefect server start, then export PREFECT_API_URL=http://127.0.0.1:4200/api and "
            "run again",
        )


def place(recipe: Recipe, call: Call, label: str) -> Outcome:
    """The outcome of `call`, from where the recipe puts its stage; raises what the stage raised."""
    return run_at(place_of(recipe, call.stage), call, label)


def run_at(
    where: Place,
    call: Call,
    label: str,
    *,
    tags: tuple[str, ...] = (),
    on_line: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """As `place`, for a place that is known. `on_line` is called with each line of a child process
    of this one."""
    outcome = find(call)
    if outcome is not None:
        return outcome
    if where.pool:
        from .pool import run_in_pool

        shared = call.stage in SHARED and not call.force
        return run_in_pool(where, replace(call, share=shared), label, tags, stopped)
    return run_here(where, call, label, on_line=on_line, stopped=stopped)


def run_when_free(
    where: Place,
    call: Call,
    label: str,
    *,
    stopped: Callable[[], bool] = lambda: False,
    **more: Any,
) -> Outcome:
    """As `run_at`; while another process is at this very work alone, wait until it has finished or
    is gone.

    So does the run that follows one whose flow was killed: what that flow had started in a pool may
    still be at work.
    """
    pause, told = POLL_SECONDS, ""
    while True:
        try:
            return run_at(where, call, label, stopped=stopped, **more)
        except BusyError as error:
            if error.message != told:
                log.warning("%s waits: %s", label, error.message)
            pause, told = min(2 * pause, _LONGEST_PAUSE_SECONDS), error.message
        until = time.monotonic() + pause
        while time.monotonic() < until and find(call) is None:
            if stopped():
                raise Stopped(label)
            time.sleep(POLL_SECONDS)


def run_here(
    where: Place,
    call: Call,
    label: str,
    *,
    on_line: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """In a child process of this one, once there is a slot for it."""
    with slots(call, label, where.slots, where.limit, stopped) as env:
        # with an environment of their own, processes know only later which devices they have
        if not env:
            for stage, config, python, online in where.prewarmed:
                prewarm(stage, config, python, online)
        return run_call(
            call,
            python=where.python,
            timeout=where.timeout_seconds,
            online=where.online,
            on_line=on_line or logging.getLogger(f"quiver.{call.stage}").info,
            env=env,
            stopped=stopped,
        )
