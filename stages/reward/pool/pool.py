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

Functions are loaded in a process when they are first called there.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from quiver.schemas.errors import ConfigError, ResourceError, from_dict, printable
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
        self._lock = threading.Lock()
        self._processes: set[Worker] = set()
        self._closing = False
        self._idle = queue.SimpleQueue[Worker | None]()
        """Processes that wait for a call; None: one that is still to be started."""
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

    def describe(self, function: Function) -> About:
        """What `function` takes. ConfigError where it can not be loaded, ResourceError where no
        process can be started."""
        if function.about is None:
            with self._process(function) as process:
                self._load(process, function)
            if function.about.is_async:
                self._add_place()
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
        started, or the pool is closed.
        """
        self.describe(function)
        job = Job(function, columns, num_rows, notice)
        if num_rows:
            self._deal(job, num_rows)
            job.done.wait()
        if job.error is not None:
            raise job.error
        return job.parts

    def close(self) -> None:
        """Kill all processes and all that they started; a `run` that waits ends with
        ResourceError."""
        with self._lock:
            self._closing = True
            for process in self._processes:
                process.kill()
        for _ in range(self._num_places):
            if process := self._idle.get():
                process.end()
        self._idle.put(None)  # whoever still waits for a place learns of it, one after the other

    def _deal(self, job: Job, num_rows: int) -> None:
        """Start threads that call rows of the job until all are taken."""
        for _ in range(min(num_rows, self.workers)):
            name = f"reward worker: {job.function.config.name}"
            threading.Thread(target=self._call_rows, args=(job,), daemon=True, name=name).start()

    def _call_rows(self, job: Job) -> None:
        rows = [0]
        try:
            while rows and not job.done.is_set():
                try:
                    with self._process(job.function) as process:
                        last_call = process.last_calls.get(job.function.key, (0, 0.0))
                        rows = job.take(last_call, self.workers)
                        if rows:
                            self._load(process, job.function)
                            self._call(process, job, rows)
                except (Late, Ended) as error:
                    job.spoiled(rows, error)
                    self._deal(job, len(rows) - 1)
                if not job.missing:
                    job.done.set()
        except BaseException as error:
            job.fail(error)

    @contextmanager
    def _process(self, function: Function) -> Iterator[Worker]:
        """An idle process, waited for, or a new one; it is ended where the block raises."""
        process = self._idle.get()
        is_sound = False
        try:
            if process is None:
                with self._lock:
                    if self._closing:
                        raise _closed()
                    process = Worker(self._memory_gib)
                    self._processes.add(process)
            try:
                yield process
            finally:
                _log_printed(process, function)
            is_sound = True
        except (Late, Ended):
            if self._closing:
                raise _closed() from None
            raise
        finally:
            if process and not is_sound:
                process.end()
                with self._lock:
                    self._processes.discard(process)
            self._idle.put(process if is_sound else None)

    def _load(self, process: Worker, function: Function) -> None:
        """Have the function loaded, once a process. ConfigError where that fails, or where its code
        is another than before."""
        if function.key in process.last_calls:
            return
        config = function.config
        load = config.model_dump(include={"use", "name", "arguments", "extra"})
        request = {"path": list(filter(None, sys.path)), "load": {"key": function.key, **load}}
        try:
            about = _read_about(process.ask(request, LOAD_SECONDS))
        except (Late, Ended) as error:
            if self._closing:
                raise
            how = f"ended its process {error}"
            if isinstance(error, Late):
                how = f"took longer than {LOAD_SECONDS:g} s"
            raise ConfigError(
                f"reward function {config.name}",
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
        process.last_calls[function.key] = (0, 0.0)

    def _call(self, process: Worker, job: Job, rows: list[int]) -> None:
        """One call. Late, Ended; what it has answered by then is kept."""
        function = job.function
        config = function.config
        is_async = function.about.is_async
        is_batch = len(rows) > 1
        limit = function.batch_seconds if is_batch else config.timeout_seconds
        columns = {name: column[rows[0] : rows[-1] + 1] for name, column in job.columns.items()}
        request = {
            "key": function.key,
            "rows": len(rows),
            "call": pickle.dumps(columns, pickle.HIGHEST_PROTOCOL),
            "at_once": config.concurrency,
            "seconds": config.timeout_seconds,
        }
        deadline = time.monotonic() + limit + (_LATE_SECONDS if is_async else 0)
        is_done = False
        while not is_done:
            # an async function's worker reports all the time, however long the rows take
            beats = is_async and is_batch
            seconds = BATCH_SECONDS if beats else deadline - time.monotonic()
            answer = _read_answer(process.ask(request, seconds), len(rows))
            for row, *part in answer.parts:
                job.put(rows[row], Part(*part))
            is_done = answer.done
            request = None
        if any(job.parts[row] is None for row in rows):
            raise Ended("after an answer that lacks rows")
        with self._lock:
            function.seconds += answer.seconds
        process.last_calls[function.key] = (len(rows), answer.seconds)


def _closed() -> ResourceError:
    return ResourceError("reward workers", "were closed while rows were scored", next="run again")


class Answer(BaseModel):
    """What a worker says of a call, or a piece of it."""

    parts: list[
        tuple[
            Annotated[int, Field(ge=0)],
            Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None,
            str | None,
            str | None,
        ]
    ]
    """Row, value, error, extra."""
    done: bool
    seconds: float = Field(default=0.0, ge=0)


def _read_answer(answer: Any, num_rows: int) -> Answer:
    """Ended where the answer is not of the form that workers give: its process is not what it
    was."""
    try:
        pieces = Answer.model_validate(answer)
    except ValidationError:
        pieces = None
    if pieces is None or any(row >= num_rows for row, *_ in pieces.parts):
        raise Ended("after an answer that can not be read")
    return pieces


def _read_about(answer: Any) -> About:
    """What the answer to a load says. QuiverError where it could not be loaded, Ended as in
    `_read_answer`."""
    try:
        if "error" in answer:
            raise from_dict(answer["error"])
        return About(**answer["about"])
    except (KeyError, TypeError):
        raise Ended("after an answer that can not be read") from None


def _log_printed(process: Worker, function: Function) -> None:
    for line in process.printed().splitlines():
        if line.strip():
            log.info("%s: %s", function.config.name, printable(line, 1000))
