"""Runs a stage on this host: as one child process, or as several that share its shards, each on
devices of its own, where [placement] devices says so. No server takes part.

    outcome = run_here(call)

Of several processes each begins as soon as there is a slot for it; those that wait for one hold up
nobody. What one of them lacks (memory, a device, its life) costs that one: the others make its
shards. Any other error ends all, and so does whatever ends the flow.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.prewarm import prewarm
from quiver.stages.common.runtime.runner import Outcome, plan_of, run_call
from quiver.stages.common.runtime.stage import load
from quiver.stages.common.runtime.subprocesses import Stopped
from quiver.stages.common.store.writer import ROWS_PER_SHARD

from .ahead import is_stopped, run_ahead
from .live import followed
from .placement import StageCall
from .slots import gpus_needed, server_limit, slots, visible_gpus

_SECONDS_TO_LEAVE = 5.0
log = logging.getLogger("quiver")


def run_here(
    call: StageCall,
    *,
    upcoming: tuple[StageCall, ...] = (),
    on_line: Callable[[str], None] | None = None,
    resident: bool = False,
) -> Outcome:
    """In child processes of this one, once there is a slot for the first. `resident`: one that
    generates alone stays for the next call, with its engine asleep, until `end_waiting`."""
    on_line = on_line or logging.getLogger(f"quiver.{call.stage}").info
    most = count = most_processes(call)
    if most > 1:
        count = min(most, _num_shards(call))
    if count < most:
        log.info("%s: shards for %d of %d processes", call.label, count, most)
    with followed(call.label, call.config, on_line) as on_line, server_limit(call.limit):
        if count > 1:
            return _run_together(call, count, on_line)
        with slots(call.runner_call, call.label, call.slots) as env:
            # with an environment of their own, processes know only later which devices they have
            for following in () if env else upcoming:
                if most_processes(following) == 1:
                    prewarm(following.stage, following.config, following.python, following.online)
            return run_call(
                call.runner_call,
                python=call.python,
                timeout=call.timeout_seconds,
                online=call.online,
                on_line=on_line,
                env=env,
                stay=resident and call.stage == "generate",
                stopped=is_stopped,
            )


def most_processes(call: StageCall) -> int:
    """How many processes may do the call together here, by its `devices` and those of the machine,
    however few shards it has. A forced call is never shared."""
    if call.devices is None or call.force or not getattr(load(call.stage), "SHARED", False):
        return 1
    gpus = visible_gpus()
    if gpus:
        devices = len(gpus) if call.devices == "all" else min(call.devices, len(gpus))
        needed = gpus_needed(call.runner_call)
        return max(1, devices // needed) if needed else 1
    if call.stage == "reward" and not call.config.get("models"):
        return 1  # functions have processes of their own
    if call.devices == "all":
        return max(1, call.slots)
    return min(call.devices, call.slots or call.devices)


def _num_shards(call: StageCall) -> int:
    plan = plan_of(call.runner_call)
    if call.stage == "generate":
        rows = plan.inputs["prompts"].manifest.rows * plan.config.samples_per_prompt
        return max(1, -(-rows // plan.config.rows_per_shard))
    return max(1, -(-plan.inputs["rollouts"].manifest.rows // ROWS_PER_SHARD))


def _run_together(call: StageCall, count: int, on_line: Callable[[str], None]) -> Outcome:
    """The outcome of `count` processes of one call."""
    shared = replace(call.runner_call, share=True)
    cores = sorted(os.sched_getaffinity(0))
    started_at = time.monotonic()
    begun: dict[int, float] = {}
    """When each process began, by its number."""

    def run_one(number: int) -> Outcome:
        with slots(shared, f"{call.label} ({number + 1} of {count})", call.slots) as env:
            begun[number] = time.monotonic()
            name = f"GPU {env['CUDA_VISIBLE_DEVICES']}" if env else f"{number + 1} of {count}"
            if not env:
                # of this thread, which its child process inherits: two that take all cores would
                # get in each other's way
                first = number * len(cores) // count
                last = max(first + 1, (number + 1) * len(cores) // count)
                os.sched_setaffinity(0, cores[first:last])
            timeout = call.timeout_seconds
            if timeout is not None:  # it is the stage's, from when the first one began
                timeout = max(0.1, timeout - begun[number] + min(begun.values()))
            return run_call(
                shared,
                python=call.python,
                timeout=timeout,
                online=call.online,
                on_line=lambda line: on_line(f"{line}  [{name}]"),
                env=env,
                stopped=is_stopped,
            )

    log.info("%s: as %d processes", call.label, count)
    with ExitStack() as stack:
        processes = [stack.enter_context(run_ahead(partial(run_one, n))) for n in range(count)]
        stack.callback(lambda: [process.stop.set() for process in processes])  # all at once
        at_work = set(processes)
        while True:
            ended, at_work = wait(at_work, timeout=0.2, return_when=FIRST_COMPLETED)
            if is_stopped():
                raise Stopped(call.label)
            errors = [error for process in ended if (error := process.exception())]
            if len(errors) < len(ended):
                outcome = next(each.result() for each in ended if each.exception() is None)
                break
            for error in errors:
                if not isinstance(error, ResourceError) or not at_work:
                    raise error
                log.warning("%s: %s; the others go on", call.label, error.message)
        for number, process in enumerate(processes):
            if number not in begun:
                process.stop.set()
        # they see that it is done, and clear up; one that is still loading an engine does not see
        wait(at_work, timeout=_SECONDS_TO_LEAVE)
    seconds = round(time.monotonic() - started_at, 3)
    return replace(outcome, cached=False, seconds=seconds)
