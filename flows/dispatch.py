"""Runs of a call where its `where` says: on a pool's workers, or on this host in child processes.

    outcome = run_at(call)

The caller has looked into the store before. Several processes run on this host if [placement]
devices says so, each on its own devices, and they share the call's shards; no server takes part.
Each begins as soon as it gets a slot, and does not delay the others. If a process lacks memory or a
device, or dies, the others make its shards. Any other error ends all of them, and so does the end
of the flow.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from quiver.schemas.errors import ResourceError
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.runner import plan_of
from quiver.stages.core.run.stage import load_stage
from quiver.stages.core.run.stage_process import run_call, start_ahead
from quiver.stages.core.store.writer import shard_rows

from .look.live import followed
from .slots import gpus_needed, server_limit, slots, visible_gpus
from .stopping import is_stopped, run_ahead

_SECONDS_TO_LEAVE = 5.0
log = logging.getLogger("quiver")


def run_at(
    call: Call,
    *,
    upcoming: Sequence[Call] = (),
    tags: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
) -> Outcome:
    """Run `call` on its pool, or in child processes once there is a slot for the first.

    Args:
        call: The call to run.
        upcoming: Next calls, whose processes may start to import now, on a core that this one
            leaves idle while it starts.
        tags: Tags of the flow runs in a pool.
        on_line: Called with each line of a child process. Default: log it.

    Raises:
        QuiverError: The stage's error.
        Stopped: If another thread stopped this work.
    """
    if call.where.pool is not None:
        from .pool import run_in_pool

        return run_in_pool(call, tags)
    on_line = on_line or logging.getLogger(f"quiver.{call.stage}").info
    most = count = most_processes(call)
    if most > 1:
        count = min(most, _num_shards(call))
    if count < most:
        log.info("%s: shards for %d of %d processes", call.label, count, most)
    with (
        followed(call.label, call.config, on_line) as on_line,
        server_limit(call.where.concurrency_limit),
    ):
        if count > 1:
            return _run_together(call, count, on_line)
        with slots(call, call.label) as env:
            # Processes with an environment of their own learn their devices only later.
            for following in () if env else upcoming:
                where = following.where
                if where.pool is None and most_processes(following) == 1:
                    start_ahead(following.stage, following.config, where.python, where.online)
            return run_call(call, on_line=on_line, env=env, stopped=is_stopped)


def most_processes(call: Call) -> int:
    """Return how many processes may share the call here, by its `devices` and this machine's.

    The number of shards is not considered. A forced call is never shared.
    """
    devices = call.where.devices
    if devices is None or call.force or not getattr(load_stage(call.stage), "SHARED", False):
        return 1
    gpus = visible_gpus()
    if gpus:
        usable = len(gpus) if devices == "all" else min(devices, len(gpus))
        needed = gpus_needed(call)
        return max(1, usable // needed) if needed else 1
    if call.stage == "reward" and not call.config.get("models"):
        return 1  # Reward functions have their own processes.
    if devices == "all":
        return max(1, call.where.slots)
    return min(devices, call.where.slots or devices)


def _num_shards(call: Call) -> int:
    plan = plan_of(call)
    if call.stage == "generate":
        rows = plan.inputs["prompts"].manifest.rows * plan.config.samples_per_prompt
        return max(1, -(-rows // plan.config.rows_in_shard(rows)))
    rows = plan.inputs["rollouts"].manifest.rows
    return max(1, -(-rows // shard_rows(rows)))


def _run_together(call: Call, count: int, on_line: Callable[[str], None]) -> Outcome:
    """Run one call as `count` processes and return its outcome."""
    # A resident engine would occupy devices which the next call may not get.
    shared = replace(call, share=True, where=replace(call.where, resident_engine=False))
    cores = sorted(os.sched_getaffinity(0))
    started_at = time.monotonic()
    started: dict[int, float] = {}
    """Start time of each process, by its number."""

    def run_one(number: int) -> Outcome:
        with slots(shared, f"{call.label} ({number + 1} of {count})") as env:
            started[number] = time.monotonic()
            name = f"GPU {env['CUDA_VISIBLE_DEVICES']}" if env else f"{number + 1} of {count}"
            if not env:
                # Set for this thread and inherited by its child process. Two processes that use all
                # cores would slow each other down.
                first = number * len(cores) // count
                last = max(first + 1, (number + 1) * len(cores) // count)
                os.sched_setaffinity(0, cores[first:last])
            timeout = call.where.timeout_seconds
            # The limit applies to the stage, from the start of its first process.
            if timeout is not None:
                timeout = max(0.1, timeout - started[number] + min(started.values()))
            return run_call(
                replace(shared, where=replace(shared.where, timeout_seconds=timeout)),
                on_line=lambda line: on_line(f"{line}  [{name}]"),
                env=env,
                stopped=is_stopped,
            )

    log.info("%s: as %d processes", call.label, count)
    with ExitStack() as stack:
        processes = [stack.enter_context(run_ahead(partial(run_one, n))) for n in range(count)]
        # Stop all at once, not one after another.
        stack.callback(lambda: [process.stop.set() for process in processes])
        at_work = set(processes)
        while True:
            ended, at_work = wait(at_work, timeout=0.2, return_when=FIRST_COMPLETED)
            if is_stopped():
                raise Stopped(call.label)
            errors = [error for process in ended if (error := process.exception())]
            if len(errors) < len(ended):
                outcome = next(process.result() for process in ended if process.exception() is None)
                break
            for error in errors:
                if not isinstance(error, ResourceError) or not at_work:
                    raise error
                log.warning("%s: %s; the others go on", call.label, error.message)
        for number, process in enumerate(processes):
            if number not in started:
                process.stop.set()
        # They see that the stage is done and clean up. One that still loads an engine does not see
        # it.
        wait(at_work, timeout=_SECONDS_TO_LEAVE)
    ended = [process for process in processes if process.done() and not process.exception()]
    if all(process.result().cached for process in ended):  # none that ended well committed it
        return outcome
    return replace(outcome, cached=False, seconds=round(time.monotonic() - started_at, 3))
