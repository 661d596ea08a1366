"""A pool of processes for reward functions. Rows are dealt out in calls of about a second, and rows
of a call that failed are called alone.

    with Pool(workers=2) as pool:
        scorer = FunctionScorer(FunctionConfig(use="numeric"), pool, 256)
        pool.describe(scorer)
        parts = pool.run(scorer, {"completions": [...], "answer": [...]}, rollout_ids)

The first call of a function in a process has one row; later calls grow with the measured speed. A
call on several rows has at most BATCH_SECONDS. If it takes longer, or its process ends, the process
is killed. Each of the rows is then called alone, with the function's own `timeout_seconds`. So a
row that hangs fails alone, and costs at most that time + BATCH_SECONDS and the start of a process;
a slow row succeeds. Results do not depend on the number of processes or the sizes of calls.

A process loads a function when it first calls it.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

from pydantic import BaseModel, Field

from quiver.schemas.errors import ResourceError
from quiver.schemas.outside import Number
from quiver.stages.core.run import user_process
from quiver.stages.core.run.stage_process import this_process
from quiver.stages.core.run.user_process import (
    Ended,
    Killed,
    Late,
    Surplus,
    UserProcess,
    memory_of_each,
)
from quiver.stages.reward.pool import calls, jobs
from quiver.stages.reward.scoring import Part

_kept: dict[tuple[int | None, float | None], Pool] = {}
"""Pools that wait for the next call of this process, by their settings. Their processes end with
this one."""
_LATE_SECONDS = 0.5  # in which an async function's process may report that a row took too long
log = logging.getLogger(__name__)


class Loaded(user_process.Loaded):
    """A process's answer to a request to load a function."""

    about: calls.About | None = None


class Answer(BaseModel):
    """A process's answer to a call, or a piece of it."""

    parts: list[tuple[Annotated[int, Field(ge=0)], Number | None, str | None, str | None]]
    """Row, value, error, extra."""
    seconds: Annotated[float, Field(ge=0)] | None
    """Seconds of the whole call. None: more pieces follow."""
    failure: str | None
    """Reason why the call on all rows failed, if the rows were then called one by one."""


class FunctionProcess(UserProcess):
    """A process in which reward functions run (see `calls.Answerer`)."""

    def __init__(self, memory_bytes: int) -> None:
        """Start the process with at most `memory_bytes` of private memory."""
        self.last_calls: dict[Any, tuple[int, float]] = {}
        """Rows and seconds of the last call here, for each function that it has loaded; 0 rows
        before the first call."""
        super().__init__(
            calls.__name__,
            memory_bytes,
            name="reward worker",
            allowance=calls.memory_allowance(memory_bytes),
            lower="reward.workers",
        )


class NotLoaded(Exception):
    """The process is lost, and the rows did not cause it. Either a signal ended it while it
    imported the function, or it answered an earlier call twice. Another process may try."""


class Pool:
    """A pool of processes, plus one for each async function.

    Args:
        workers: Number of processes. Default: one per core.
        memory_gib: Memory of each. Default: its share of the machine's memory.
    """

    def __init__(self, workers: int | None = None, memory_gib: float | None = None) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._memory_bytes = memory_of_each(self.workers, memory_gib)
        self._lock = threading.Lock()
        self._processes: set[FunctionProcess] = set()
        self._closing = False
        self._idle = queue.SimpleQueue[FunctionProcess | None]()
        """Processes that wait for a call. None: a process that is not started yet."""
        self._num_places = 0
        for _ in range(self.workers):
            self._add_place()

    def _add_place(self) -> None:
        self._num_places += 1
        self._idle.put(None)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, function: jobs.Function) -> calls.About:
        """Return how to call `function`. Raises ConfigError if it cannot be loaded, ResourceError
        if no process can be started, or none lives long enough."""
        if function.about is None:
            while function.about is None:
                with suppress(NotLoaded), self._process(function) as process:
                    self._load(process, function)
            if function.about.is_async:
                self._add_place()
        return function.about

    def run(
        self,
        function: jobs.Function,
        columns: dict[str, list[Any]],
        rollout_ids: list[str | None],
        sizes: list[int] | None = None,
    ) -> list[Part]:
        """Return one part per row of a function that was described.

        The function's `notice` is called at once for each error of a row with an id, from another
        thread. An exception it raises is raised here.

        Args:
            sizes: Sizes of the groups that the rows form; each call then has one group.

        Raises:
            ConfigError: The function cannot be loaded.
            ResourceError: No process can be started, none lives long enough to load it, or the pool
                is closed.
        """
        job = jobs.Job(function, columns, rollout_ids, sizes)
        if rollout_ids:
            self._deal(job, len(rollout_ids))
            job.done.wait()
        if job.error is not None:
            raise job.error
        return job.parts

    def close(self) -> None:
        """Kill all processes and everything that they started. A waiting `run` ends with
        ResourceError."""
        with self._lock:
            self._closing = True
            for process in self._processes:
                process.kill()
        for _ in range(self._num_places):
            if process := self._idle.get():
                process.end()
        self._idle.put(None)  # wakes each thread that still waits for a place, one by one

    def _deal(self, job: jobs.Job, num_rows: int) -> None:
        """Start threads that call rows of the job until all are taken."""
        for _ in range(min(num_rows, self.workers)):
            name = f"reward worker: {job.function.config.name}"
            threading.Thread(target=self._call_rows, args=(job,), daemon=True, name=name).start()

    def _call_rows(self, job: jobs.Job) -> None:
        rows = range(1)
        try:
            while rows and not job.done.is_set():
                try:
                    with self._process(job.function) as process:
                        last_call = process.last_calls.get(job.function, (0, 0.0))
                        rows = job.take(last_call, self.workers)
                        if rows:
                            self._load(process, job.function)
                            self._call(process, job, rows)
                except NotLoaded:
                    job.put_back(rows)
                except (Late, Ended) as error:
                    job.spoiled(rows, error)
                    self._deal(job, len(rows) - 1)
                if not job.num_missing:
                    job.done.set()
        except BaseException as error:
            job.error = job.error or error
            job.done.set()

    @contextmanager
    def _process(self, function: jobs.Function) -> Iterator[FunctionProcess]:
        """Wait for an idle process, or start one. The process is ended if the block raises."""
        process = self._idle.get()
        is_sound = False
        try:
            if process is None:
                with self._lock:
                    if self._closing:
                        raise _closed()
                    process = FunctionProcess(self._memory_bytes)
                    self._processes.add(process)
            try:
                yield process
            finally:
                process.log_printed(log, function.config.name)
            is_sound = True
        except (Late, Ended) as error:
            if self._closing:
                raise _closed() from None
            has_called = any(rows for rows, _ in process.last_calls.values())
            if isinstance(error, Surplus) and has_called:
                raise NotLoaded from None
            raise
        finally:
            if process and not is_sound:
                process.end()
                with self._lock:
                    self._processes.discard(process)
            self._idle.put(process if is_sound else None)

    def _load(self, process: FunctionProcess, function: jobs.Function) -> None:
        """Load the function in a process, once.

        Raises:
            ConfigError: Loading fails, or the code changed since it was first loaded.
            NotLoaded: Another process may try.
            ResourceError: Signals ended several processes in a row.
        """
        if function in process.last_calls:
            return
        config = function.config
        options = {"use", "name", "arguments", "extra", "style", "scope"}
        try:
            answer = process.load(
                config.model_dump(include=options),
                Loaded,
                title=f"reward function {config.name}",
                key=id(function),
                expected=function.about.fingerprint if function.about else config.fingerprint,
                attempt=function.kills + 1,
            )
        except (Killed, Surplus) as error:
            if self._closing:
                raise
            function.kills += isinstance(error, Killed)
            raise NotLoaded from None
        function.about = answer.about
        function.kills = 0
        process.last_calls[function] = (0, 0.0)

    def _call(self, process: FunctionProcess, job: jobs.Job, rows: range) -> None:
        """Make one call. Raises Late or Ended; rows answered before that are kept."""
        function = job.function
        config = function.config
        is_async = function.about.is_async
        is_batch = not job.is_alone(rows)
        limit = function.batch_seconds if is_batch else config.timeout_seconds
        request = {
            "key": id(function),
            "rows": len(rows),
            "call": pickle.dumps(calls.pick(job.columns, rows), pickle.HIGHEST_PROTOCOL),
            "at_once": config.concurrency,
            "seconds": config.timeout_seconds,
        }
        deadline = time.monotonic() + limit + (_LATE_SECONDS if is_async else 0)
        seconds_of_call = None
        while seconds_of_call is None:
            # an async function's process sends pieces all the time, however long the rows take
            beats = is_async and is_batch
            patience = jobs.BATCH_SECONDS if beats else deadline - time.monotonic()
            answer = process.ask(request, patience, Answer)
            if any(row >= len(rows) for row, *_ in answer.parts):
                raise Ended("ended after an answer that cannot be read")
            for row, *part in answer.parts:
                job.put(rows[row], Part(*part))
            seconds_of_call = answer.seconds
            request = None
            if answer.failure is not None:
                function.tell_done_again(len(rows), answer.failure)
        if None in job.parts[rows.start : rows.stop]:
            raise Ended("ended after an answer that lacks rows")
        with self._lock:
            function.seconds += seconds_of_call
        process.last_calls[function] = (len(rows), seconds_of_call)


@contextmanager
def open_pool(workers: int | None, memory_gib: float | None) -> Iterator[Pool]:
    """Open a pool and close it. A process that will answer further calls keeps it for them, unless
    the block raises, since starting Python costs more than scoring a few rows."""
    settings = (workers, memory_gib)
    pool = _kept.pop(settings, None) or Pool(*settings)
    keeps = False
    try:
        yield pool
        # an async function has added a place
        keeps = this_process.may_be_resident and pool._num_places == pool.workers
    finally:
        if keeps:
            _kept[settings] = pool
        else:
            pool.close()


def _closed() -> ResourceError:
    return ResourceError("reward workers", "were closed while rows were scored", next="run again")
