"""The Prefect task that makes a stage's version within a flow, with retries and a page.

The task passes references and small numbers, never data. Its cache is the store, not Prefect's: a
finished version is found before, and then no task runs. The task is called directly, never
submitted, so that a cancelled flow ends the stage at once. Its name holds run, stage and iteration.
Flow runs carry tags, task runs do not: Prefect asks its server for a slot for each tag of a task,
before and after it. A task is retried, with growing pauses, if the error's code says that a retry
can help.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TagsContext, TaskRunContext

from quiver.schemas.errors import SYSTEM_REASONS, BusyError, QuiverError
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.runner import find_outcome
from quiver.stages.core.run.stage_process import end_waiting

from .calls import calls_of
from .dispatch import run_at
from .look.pages import show_version
from .placement import GivenUp
from .progress import progress
from .recipe import Recipe
from .stopping import is_stopped

WORTH_RETRYING = {"E-REMOTE", "E-RESOURCE"}
_REFUSED = tuple(SYSTEM_REASONS[number] for number in (errno.EROFS, errno.EACCES, errno.EPERM))
"""Prefixes of errors from a host that forbids writing; a retry cannot help."""
_LONGEST_WORD = 100
POLL_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0  # Each try in a pool is a run of its own on the server.
log = logging.getLogger("quiver")


def worth_retrying(task: Task, run: TaskRun, state: State) -> bool:
    """True if the error may be transient: a server, memory or a process was lost.

    Never for bad input, a store that cannot be written, or a forced call.
    """
    context = TaskRunContext.get()
    if context is not None and context.parameters["call"].force:
        return False
    error = state.data
    if not isinstance(error, QuiverError) or isinstance(error, GivenUp):
        return False
    if error.code not in WORTH_RETRYING or error.message.startswith(_REFUSED):
        return False
    log.warning("%s: %s; trying again soon", error.object, error.message)
    # A sleeping engine holds memory of the device and of this machine, which the retry may need.
    end_waiting()
    return True


@task(
    name="stage",
    task_run_name="{call.label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_condition_fn=worth_retrying,
)
def stage_task(call: Call, upcoming: Sequence[Call], tags: Sequence[str]) -> Outcome:
    """Make one stage's version and return its reference with a few numbers.

    If another process does the same work alone, the task waits for its version, or until the work
    is free. This also covers a run whose flow was killed: its runs in a pool may still be at work.
    Of the metrics, only single numbers and short words are returned.
    """
    outcome = None
    pause = POLL_SECONDS
    last_message = ""
    with progress(call, logging.getLogger(f"quiver.{call.stage}").info) as on_line:
        while outcome is None:
            try:
                outcome = run_at(call, upcoming=upcoming, tags=tags, on_line=on_line)
            except BusyError as error:
                if error.message != last_message:
                    log.warning("%s waits: %s", call.label, error.message)
                last_message = error.message
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                until = time.monotonic() + pause
                while outcome is None and time.monotonic() < until:
                    if is_stopped():
                        raise Stopped(call.label) from None
                    time.sleep(POLL_SECONDS)
                    outcome = find_outcome(call)
    show_version(call, outcome)
    metrics = {}
    for name, metric in outcome.metrics.items():
        is_word = isinstance(metric, str) and len(metric) <= _LONGEST_WORD
        if metric is None or isinstance(metric, int | float) or is_word:
            metrics[name] = metric
    return replace(outcome, metrics=metrics)


@contextmanager
def as_tasks(recipe: Recipe) -> Iterator[None]:
    """Let `perform` inside call the stages as tasks, and end waiting processes afterwards.

    Outside a flow run no server is asked, and nothing is retried. A finished version counts as done
    even if its files were deleted.
    """
    runner = stage_task.fn
    if FlowRunContext.get() is not None:
        retries = recipe.placement.retries
        delays = [recipe.placement.retry_seconds * 3**attempt for attempt in range(retries)]
        runner = stage_task.with_options(retries=retries, retry_delay_seconds=delays)
    with calls_of(recipe, runner, expired=True), TagsContext(current_tags=set()):
        try:
            yield
        finally:
            end_waiting()
