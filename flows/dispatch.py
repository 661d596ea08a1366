"""Dispatch of a stage to the place where it runs: a child process, or a pool's workers.

    outcome = run_at(call, recipe.placement)

In both cases a finished version is found in this process, in milliseconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import BusyError
from quiver.stages.common import ranks
from quiver.stages.common.launched import are_launched, is_led
from quiver.stages.common.runtime.runner import Outcome, find
from quiver.stages.common.runtime.subprocesses import Stopped

from .ahead import is_stopped
from .here import run_here
from .placement import StageCall
from .recipe import Placement

POLL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0  # Each try in a pool is a run of its own on the server.
log = logging.getLogger("quiver")


def run_at(
    call: StageCall,
    placement: Placement,
    *,
    upcoming: tuple[StageCall, ...] = (),
    tags: tuple[str, ...] = (),
    on_line: Callable[[str], None] | None = None,
    resident: bool = False,
) -> Outcome:
    """Run `call` where `placement` puts its stage, and return its outcome.

    Args:
        call: The call to run.
        placement: The recipe's [placement].
        upcoming: Calls whose processes are started together with this one. They import modules on a
            core that this one leaves idle while it starts.
        tags: Tags of the flow runs in a pool.
        on_line: Called with each line of a child process.
        resident: If true, an engine in a child process may stay for the next call.

    Raises:
        QuiverError: The stage's error.
        Stopped: If another thread stopped this work.
    """
    outcome = find(call.runner_call, expired=call.expired)
    is_rank = are_launched() and ranks.can_share(call.stage)
    while outcome is None and not is_rank and is_led():
        # rank 0 makes it; if it fails, the launcher ends the ranks of its host
        time.sleep(POLL_SECONDS)
        outcome = find(call.runner_call, expired=call.expired)
    if outcome is not None:
        return outcome
    pool = placement.pools.get(call.stage)
    if pool is None or is_rank:
        return run_here(call, upcoming=upcoming, on_line=on_line, resident=resident)
    from .pool import run_in_pool

    return run_in_pool(call.for_workers(), pool, placement, tags)


def run_when_free(call: StageCall, placement: Placement, **options: Any) -> Outcome:
    """Run `call` like `run_at`, but wait while another process does the same work alone.

    This also covers a run whose flow was killed: its runs in a pool may still be at work.
    """
    pause = POLL_SECONDS
    last_message = ""
    while True:
        try:
            return run_at(call, placement, **options)
        except BusyError as error:
            if error.message != last_message:
                log.warning("%s waits: %s", call.label, error.message)
            last_message = error.message
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        until = time.monotonic() + pause
        while time.monotonic() < until and find(call.runner_call, expired=call.expired) is None:
            if is_stopped():
                raise Stopped(call.label)
            time.sleep(POLL_SECONDS)
