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
from quiver.stages.common.child import Stopped
from quiver.stages.common.early import Hint, begin_early, end_early
from quiver.stages.common.runtime.runner import Call, Outcome, perform, run_stage
from quiver.stages.common.work import NotDone

from .recipe import Recipe
from .slots import slots

SHARED = ("generate", "reward", "logprobs")
"""Stages that any number of workers do together, shard by shard."""
POLL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0  # each try in a pool is a run of its own on the server
log = logging.getLogger("quiver")


class GivenUp(ResourceError):
    """Nobody took the stage up, or somebody ended it: to try again by itself would not help."""


class Next(NamedTuple):
    """A stage that comes soon, in a child process of this one."""

    stage: str
    hint: Hint
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
    soon: tuple[Next, ...] = ()
    """Whose processes are begun with this one's: they import, on a core that this one leaves idle
    as it starts; and where this stage makes their checkpoint, they start as soon as its model is
    whole."""


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


def coming(recipe: Recipe, hints: Mapping[str, Hint]) -> tuple[Next, ...]:
    """Those of the stages hinted at that will run in a child process of this one."""
    places = {stage: place_of(recipe, stage) for stage in hints}
    return tuple(
        Next(name, hints[name], at.python, at.online) for name, at in places.items() if not at.pool
    )


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
    announcement = ""
    if not call.force:
        try:
            return perform(call, lookup=True)
        except NotDone as missing:
            announcement = str(missing.work.announcement)
    if where.pool:
        from .pool import run_in_pool

        shared = call.stage in SHARED and not call.force
        return run_in_pool(where, replace(call, share=shared), label, tags, stopped)
    return run_here(where, call, label, announcement, on_line=on_line, stopped=stopped)


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
        while time.monotonic() < until and not _is_done(call):
            if stopped():
                raise Stopped(label)
            time.sleep(POLL_SECONDS)


def _is_done(call: Call) -> bool:
    if call.force:  # done is not enough; it is to be done anew
        return False
    try:
        perform(call, lookup=True)
    except NotDone:
        return False
    return True


def run_here(
    where: Place,
    call: Call,
    label: str,
    announcement: str = "",
    *,
    on_line: Callable[[str], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """In a child process of this one, once there is a slot for it. `announcement`: where the stage
    says that its model is whole; engines that come soon wait for that, unless somebody counts who
    is at work on this host."""
    if call.stage not in ("prompt", "generate"):
        end_early(engines=True)  # nobody took it up, and this one may need the memory
    if call.stage != "optimize" or where.slots or where.limit:
        announcement = ""
    with slots(call, label, where.slots, where.limit, stopped) as env:
        for stage, hint, python, online in (
            () if env else where.soon
        ):  # else they know only later which devices they have
            begin_early(stage, replace(hint, announcement=announcement), python, online)
        try:
            return run_stage(
                call,
                python=where.python,
                timeout=where.timeout_seconds,
                online=where.online,
                on_line=on_line or logging.getLogger(f"quiver.{call.stage}").info,
                env=env,
                stopped=stopped,
            )
        except BaseException:
            end_early(engines=True)
            raise
