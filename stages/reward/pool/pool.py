"""A pool of worker processes: rows are dealt out in calls of about a second, and a row that spoils
its call is called alone.

    with Pool(workers=2) as pool:
        function = Function(FunctionConfig(use="numeric"))
        parts = pool.run(function, {"completions": [...], "answer": [...]}, num_rows=256)

A worker's first call of a function has one row, later ones grow with the measured speed. A call on
several rows has at most BATCH_SECONDS; where it takes longer, or its process ends, the process is
killed and each of the rows is called alone, with the function's own `timeout_seconds`. So a row
that hangs costs itself alone, at most that time + BATCH_SECONDS and the start of a process, and a
slow one succeeds. What comes out does not depend on how many workers there are, nor on the calls'
sizes.

Processes start when there is work for them, and functions are loaded when first called.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import ConfigError, ResourceError, from_dict, printable, unexpected
from quiver.stages.reward.pool.calls import About
from quiver.stages.reward.pool.jobs import BATCH_SECONDS, Function, Job
from quiver.stages.reward.pool.process import Ended, Late, Worker
from quiver.stages.reward.scoring import LARGEST, Part

LOAD_SECONDS = 120.0
_LATE_SECONDS = 0.5  # in which an async function's worker may report that a row took too long
log = logging.getLogger(__name__)


class Pool:
    """`workers` processes (None: one a core), each with at most `memory_gib`; and one more for each
    async function."""

    def __init__(self, workers: int | None = None, memory_gib: float | None = None) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._memory_gib = memory_gib
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._lanes: list[threading.Thread] = []
        self._processes: set[Worker] = set()
        self._closing = False

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self, function: Function) -> About:
        """What `function` takes. ConfigError where it can not be loaded."""
        if function.about is None:
            self._perform(Job(function, {}, 0, lambda *_: None))
        return function.about

    def run(
        self,
        function: Function,
        columns: dict[str, list[Any]],
        num_rows: int,
        notice: Callable[[int, Part], None] = lambda *_: None,
    ) -> list[Part]:
        """One part a row. `notice` hears of each error at once, from another thread; what it
        raises, this does.

        ConfigError where the function can not be loaded, ResourceError where no process can be
        started.
        """
        job = Job(function, columns, num_rows, notice)
        if num_rows:
            self._perform(job)
        return job.parts

    def close(self) -> None:
        """Kill all processes and all that they started; a `run` that waits ends with
        ResourceError."""
        with self._changed:
            self._closing = True
            for process in self._processes:
                process.kill()
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    def _perform(self, job: Job) -> None:
        """Have the lanes do the job, and wait for its end."""
        with self._changed:
            if self._closing:
                raise _closed()
            self._jobs.append(job)
            functions = {job.function for job in self._jobs}
            num_async = sum(bool(each.about and each.about.is_async) for each in functions)
            while len(self._lanes) < self.workers + num_async:
                name = f"reward worker {len(self._lanes)}"
                self._lanes.append(threading.Thread(target=self._lane, daemon=True, name=name))
                self._lanes[-1].start()
            self._changed.notify_all()
        job.done.wait()
        if job.error is not None:
            raise job.error

    # -- lanes: one thread and at most one process each

    def _lane(self) -> None:
        process = None
        failure = _closed()
        try:
            while (call := self._next_call(process)) is not None:
                process = self._perform_call(process, *call)
        except BaseException as error:
            failure = unexpected("reward workers", error)
        finally:
            self._end(process)
            with self._changed:
                # one lane that failed is missing for ever: better none than calls that wait for it
                self._closing = True
                self._changed.notify_all()
                for job in self._jobs[:]:
                    job.error = job.error or failure
                    self._finish(job)

    def _next_call(self, process: Worker | None) -> tuple[Job, list[int]] | None:
        """Rows of the job that has the fewest calls under way; None when the pool closes."""
        with self._changed:
            while not self._closing:
                open_jobs = [job for job in self._jobs if job.open]
                if open_jobs:
                    job = min(open_jobs, key=lambda job: job.running)
                    job.running += 1
                    largest_call = process.grown.get(job.function.key, 0) if process else 0
                    return job, job.take(largest_call, self.workers)
                self._changed.wait()
        return None

    def _perform_call(self, process: Worker | None, job: Job, rows: list[int]) -> Worker | None:
        """Perform one call; the lane's process after it, None where it had to be killed."""
        is_alive = True
        try:
            process = process or self._start()
            self._load(process, job.function)
            if rows:
                self._ask(process, job, rows)
        except (Late, Ended) as error:
            is_alive = False
            try:
                if self._closing:
                    raise _closed() from None
                job.spoiled(rows, error)
            except BaseException as raised:
                job.error = job.error or raised
        except BaseException as error:
            is_alive = False
            job.error = job.error or error
        if not is_alive:
            self._end(process)
        if process:
            _log_printed(process, job.function)
        with self._changed:
            job.running -= 1
            if job.error or not job.missing:
                self._finish(job)
            self._changed.notify_all()
        return process if is_alive else None

    def _finish(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        job.done.set()

    def _start(self) -> Worker:
        process = Worker(self._memory_gib)
        with self._changed:
            self._processes.add(process)
            if self._closing:
                process.kill()
        return process

    def _end(self, process: Worker | None) -> None:
        if process is not None:
            process.end()
            with self._changed:
                self._processes.discard(process)

    def _load(self, process: Worker, function: Function) -> None:
        """Have the function loaded, once a process. ConfigError where that fails, or where its code
        is another than before."""
        if function.key in process.grown:
            return
        config = function.config
        names = {"use", "name", "arguments", "extra"}
        process.send({"load": {"key": function.key, **config.model_dump(include=names)}})
        try:
            about = _read_about(process.receive(LOAD_SECONDS))
        except (Late, Ended) as error:
            if self._closing:
                raise
            if isinstance(error, Late):
                how = f"took longer than {LOAD_SECONDS:g} s"
            else:
                how = f"ended its process {error}"
            raise ConfigError(
                f"reward function {function.config.name}",
                f"importing {printable(config.use)} {how}",
                next=f"see what {printable(config.use)} does when it is imported",
            ) from None
        expected = function.about.fingerprint if function.about else config.fingerprint
        if expected and expected != about.fingerprint:
            raise ConfigError(
                f"reward function {config.name}",
                f"its file changed meanwhile: fingerprint expected {expected}, found "
                f"{about.fingerprint}",
                state="finished shards are kept.",
                next="run again",
            )
        function.about = about
        process.grown[function.key] = 0

    def _ask(self, process: Worker, job: Job, rows: list[int]) -> None:
        """One call. Late, Ended; what it has answered by then is kept."""
        function = job.function
        is_async = function.about.is_async
        is_batch = len(rows) > 1
        limit = function.batch_seconds if is_batch else function.config.timeout_seconds
        columns = {name: column[rows[0] : rows[-1] + 1] for name, column in job.columns.items()}
        process.send(
            {
                "key": function.key,
                "rows": len(rows),
                "call": pickle.dumps(columns, pickle.HIGHEST_PROTOCOL),
                "at_once": function.config.concurrency,
                "seconds": function.config.timeout_seconds,
            }
        )
        deadline = time.monotonic() + limit + (_LATE_SECONDS if is_async else 0)
        answer = {"done": False}
        while not answer["done"]:
            # an async function's worker reports all the time, however long the rows take
            beats = is_async and is_batch
            answer = process.receive(BATCH_SECONDS if beats else deadline - time.monotonic())
            for row, part in _read_parts(answer, len(rows)):
                job.put(rows[row], part)
        if any(job.parts[row] is None for row in rows):
            raise Ended("after an answer that lacks rows")
        with self._changed:
            function.seconds += answer["seconds"]
            function.row_seconds = answer["seconds"] / len(rows)
            if is_batch:
                function.rows_now = min(function.max_rows, function.rows_now * 2)
            process.grown[function.key] = max(process.grown[function.key], len(rows))


def _closed() -> ResourceError:
    return ResourceError("reward workers", "were closed while rows were scored", next="run again")


def _read_about(answer: dict[str, Any]) -> About:
    """What the answer to a load says. QuiverError where it could not be loaded, Ended as in
    `_read_parts`."""
    try:
        if "error" in answer:
            raise from_dict(answer["error"])
        return About(**answer["about"])
    except (KeyError, TypeError):
        raise Ended("after an answer that can not be read") from None


def _read_parts(answer: dict[str, Any], num_rows: int) -> list[tuple[int, Part]]:
    """Rows and their parts. Ended where the answer is not of the form that workers give: its
    process is not what it was."""
    try:
        parts = [(row, Part(*columns)) for row, *columns in answer["parts"]]
        is_sound = (answer["done"] is False or answer["seconds"] >= 0) and all(
            0 <= row < num_rows
            and (part.value is None or abs(part.value) <= LARGEST)
            and isinstance(part.error, str | None)
            and isinstance(part.extra, str | None)
            for row, part in parts
        )
    except (KeyError, TypeError, ValueError):
        is_sound = False
    if not is_sound:
        raise Ended("after an answer that can not be read")
    return parts


def _log_printed(process: Worker, function: Function) -> None:
    for line in process.printed().splitlines():
        if line.strip():
            log.info("%s: %s", function.config.name, printable(line, 1000))
