"""A pool of worker processes: rows are dealt out in calls of about a second, and a row that spoils
its call is called alone.

    with Pool(workers=2) as pool:
        function = Function(use="numeric", name="numeric", arguments={})
        parts = pool.run(function, {"completions": [...], "answer": [...]}, rows=256)

A worker's first call of a function has one row, later ones grow with the measured speed. A call on
several rows has at most BATCH_SECONDS; where it takes longer, or its process ends, the process is
killed and each of the rows is called alone, with the function's own `seconds`. So a row that hangs
costs itself alone, at most seconds + BATCH_SECONDS and the start of a process, and a slow one
succeeds. What comes out does not depend on how many workers there are, nor on the calls' sizes.

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
from quiver.stages.reward.pool.jobs import BATCH_SECONDS, About, Function, Job
from quiver.stages.reward.pool.process import Ended, Late, Worker
from quiver.stages.reward.scoring import LARGEST, Part

LOAD_SECONDS = 120.0
_START_SECONDS = 0.1  # of work that is worth a process
_LATE_SECONDS = 0.5  # how long an async function's own time limit may take to be told
log = logging.getLogger(__name__)


class Pool:
    """At most `workers` processes (None: one a core), each with at most `memory_gib`; and one more
    for each async function."""

    def __init__(self, workers: int | None = None, memory_gib: float | None = None) -> None:
        self.workers, self.memory_gib = workers or len(os.sched_getaffinity(0)), memory_gib
        self._changed = threading.Condition()
        self._jobs: list[Job] = []
        self._lanes: list[threading.Thread] = []
        self._most = self.workers
        self._live: set[Worker] = set()
        self._started = self._idle = 0  # lanes with a process, and those of them that wait
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
        rows: int,
        notice: Callable[[int, Part], None] = lambda *_: None,
    ) -> list[Part]:
        """One part for each of `rows` rows. `notice` hears of each error at once, from another
        thread; what it raises, this does.

        ConfigError where the function can not be loaded, ResourceError where no process can be
        started.
        """
        job = Job(function, columns, rows, notice)
        if rows:
            self._perform(job)
        return job.parts

    def close(self) -> None:
        """Kill all processes and all that they started; a `run` that waits ends with
        ResourceError."""
        with self._changed:
            self._closing = True
            for worker in self._live:
                worker.kill()
            self._changed.notify_all()
        for lane in self._lanes:
            lane.join()

    def _perform(self, job: Job) -> None:
        with self._changed:
            if self._closing:
                raise _closed()
            self._jobs.append(job)
            waiting = {
                each.function.key
                for each in self._jobs
                if each.function.about and each.function.about.waits
            }
            self._most = self.workers + len(waiting)
            self._spare()
            self._changed.notify_all()
        job.done.wait()
        if job.error is not None:
            raise job.error

    # -- lanes: one thread and at most one process each

    def _spare(self) -> None:
        """One lane without a process, beside those that have one, as long as more may have one."""
        if self._started == len(self._lanes) < self._most:
            self._lanes.append(
                threading.Thread(
                    target=self._lane, daemon=True, name=f"reward worker {len(self._lanes)}"
                )
            )
            self._lanes[-1].start()

    def _lane(self) -> None:
        worker, failure = None, _closed()
        try:
            while (turn := self._next(worker)) is not None:
                worker = self._call(worker, *turn)
        except BaseException as error:
            failure = unexpected("reward workers", error)
        finally:
            self._end(worker)
            with self._changed:
                # one lane that failed is missing for ever: better none than calls that wait for it
                self._closing = True
                self._changed.notify_all()
                for job in self._jobs[:]:
                    job.error = job.error or failure
                    self._finish(job)

    def _next(self, worker: Worker | None) -> tuple[Job, list[int]] | None:
        """The next call; None when the pool closes. A lane without a process takes one only where
        that is worth starting one."""
        with self._changed:
            while not self._closing:
                jobs = sorted((job for job in self._jobs if job.open), key=lambda job: job.running)
                job = next((job for job in jobs if worker or self._worth(job)), None)
                if job is not None:
                    job.running += 1
                    self._started += worker is None
                    self._spare()
                    several = self._started > 1 or job.seconds() > _START_SECONDS
                    grown = worker.grown.get(job.function.key, 0) if worker else 0
                    return job, job.take(grown, self.workers if several else 1)
                self._idle += worker is not None
                self._changed.wait(_START_SECONDS / 2 if jobs else None)
                self._idle -= worker is not None
        return None

    def _worth(self, job: Job) -> bool:
        return self._started == 0 or (self._idle == 0 and job.seconds() > _START_SECONDS)

    def _call(self, worker: Worker | None, job: Job, rows: list[int]) -> Worker | None:
        """Perform one call; the lane's worker after it, None where it had to be killed."""
        used = worker
        try:
            used = worker = worker or self._start()
            self._load(worker, job.function)
            if rows:
                self._ask(worker, job, rows)
        except (Late, Ended) as error:
            worker = self._end(worker)
            try:
                if self._closing:
                    raise _closed() from None
                job.spoiled(rows, error)
            except BaseException as told:
                job.error = job.error or told
        except BaseException as error:
            worker = self._end(worker)
            job.error = job.error or error
        if used:
            _say(used, job.function)
        with self._changed:
            self._started -= worker is None
            job.running -= 1
            if job.error or not job.missing:
                self._finish(job)
            self._changed.notify_all()
        return worker

    def _finish(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
        job.done.set()

    def _start(self) -> Worker:
        worker = Worker(self.memory_gib)
        with self._changed:
            self._live.add(worker)
            if self._closing:
                worker.kill()
        return worker

    def _end(self, worker: Worker | None) -> None:
        if worker is not None:
            worker.end()
            with self._changed:
                self._live.discard(worker)

    def _load(self, worker: Worker, function: Function) -> None:
        """Have the function loaded, once a process. ConfigError where that fails, or where its code
        is another than before."""
        if function.key in worker.grown:
            return
        wanted = {
            key: getattr(function, key) for key in ("key", "use", "name", "arguments", "extra")
        }
        worker.send({"load": wanted})
        try:
            found = _about(worker.receive(LOAD_SECONDS))
        except (Late, Ended) as error:
            if self._closing:
                raise
            how = (
                f"took longer than {LOAD_SECONDS:g} s"
                if isinstance(error, Late)
                else f"ended its process {error}"
            )
            name, what = (
                f"reward function {function.name}",
                f"importing {printable(function.use)} {how}",
            )
            next = f"see what {printable(function.use)} does when it is imported"
            raise ConfigError(name, what, next=next) from None
        if function.about and function.about.fingerprint != found.fingerprint:
            what = (
                f"its file changed meanwhile: fingerprint expected {function.about.fingerprint}, "
                f"found {found.fingerprint}"
            )
            raise ConfigError(
                f"reward function {function.name}",
                what,
                state="finished shards are kept.",
                next="run again",
            )
        function.about, worker.grown[function.key] = found, 0

    def _ask(self, worker: Worker, job: Job, rows: list[int]) -> None:
        """One call. Late, Ended; what it has answered by then is kept."""
        function, waits = job.function, job.function.about.waits
        limit = function.seconds if len(rows) == 1 else function.batch_seconds
        chosen = {name: values[rows[0] : rows[-1] + 1] for name, values in job.columns.items()}
        request = {
            "key": function.key,
            "rows": len(rows),
            "call": pickle.dumps(chosen, pickle.HIGHEST_PROTOCOL),
        }
        worker.send({**request, "at_once": function.at_once, "seconds": function.seconds})
        end = time.monotonic() + limit + (_LATE_SECONDS if waits else 0)
        answer = {"done": False}
        while not answer["done"]:
            beats = waits and len(rows) > 1
            answer = worker.receive(BATCH_SECONDS if beats else end - time.monotonic())
            for row, part in _parts(answer, len(rows)):
                job.put(rows[row], part)
        if any(job.parts[row] is None for row in rows):
            raise Ended("after an answer that lacks rows")
        with self._changed:
            function.spent += answer["seconds"]
            function.row_seconds = answer["seconds"] / len(rows)
            function.now = min(function.rows, function.now * 2) if len(rows) > 1 else function.now
            worker.grown[function.key] = max(worker.grown[function.key], len(rows))


def _closed() -> ResourceError:
    return ResourceError("reward workers", "were closed while rows were scored", next="run again")


def _about(answer: dict[str, Any]) -> About:
    """What the answer to a load says. QuiverError where it could not be loaded, Ended as in
    `_parts`."""
    try:
        if "error" in answer:
            raise from_dict(answer["error"])
        about = answer["about"]
        takes = None if about["takes"] is None else frozenset(about["takes"])
        return About(takes, frozenset(about["needs"]), about["waits"], about["fingerprint"])
    except (KeyError, TypeError):
        raise Ended("after an answer that can not be read") from None


def _parts(answer: dict[str, Any], rows: int) -> list[tuple[int, Part]]:
    """Rows and their parts. Ended where the answer is not of the form that workers give: its
    process is not what it was."""
    try:
        parts = [(row, Part(value, error, extra)) for row, value, error, extra in answer["parts"]]
        good = all(
            0 <= row < rows and (p.value is None or abs(p.value) <= LARGEST) for row, p in parts
        )
        texts = all(isinstance(text, str | None) for _, part in parts for text in part[1:])
        timed = not answer["done"] or answer["seconds"] >= 0
    except (KeyError, TypeError, ValueError):
        good = texts = timed = False
    if not (good and texts and timed):
        raise Ended("after an answer that can not be read")
    return parts


def _say(worker: Worker, function: Function) -> None:
    for line in worker.printed().splitlines():
        if line.strip():
            log.info("%s: %s", function.name, printable(line, 1000))
