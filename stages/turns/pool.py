"""A pool of processes with many environments each; a hang or crash fails one episode only.

    with EnvironmentPool(config) as pool:
        key = pool.open({"prompt": "…", "answer": 7}, seed)
        pool.step(key, Turn("…"))
        for reply in pool.replies(wait=1.0):
            ...

Each request is answered once by `replies`, in any order. A process answers one request at a time,
and a request's time limit begins when its turn has come. A process that takes too long is killed,
and the episode that it was answering fails. An episode also fails if its process ends twice.

The other episodes of a lost process are restored in a new one at their next request: their turns
are replayed and must give the same observations, rewards and ends, else the episode fails too.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field, field_validator

from quiver.schemas.errors import QuiverError, ResourceError, printable
from quiver.stages.core.run import user_process
from quiver.stages.core.run.user_process import Ended, Killed, Late, UserProcess, memory_of_each
from quiver.stages.turns import environment_process
from quiver.stages.turns.environment import Row, Step, Turn
from quiver.stages.turns.environment_config import EnvironmentConfig
from quiver.stages.turns.tool_schemas import ToolSchema

_ATTEMPTS = 2
"""Workers that may end, one after another, while answering one request."""
Failure = Literal["timeout", "environment_error"]
log = logging.getLogger(__name__)


class Reply(NamedTuple):
    """The answer to one request."""

    key: int
    step: Step
    """For `open`, the opening messages; for `finish`, the reward of the whole episode."""
    seconds: float
    """Time that the environment took."""
    failure: Failure | None = None
    """Kind of failure; if set, the episode is over and takes no more requests."""
    why: str = ""


class Loaded(user_process.Loaded):
    """A process's answer to loading the environment's code."""

    tools: list[ToolSchema] = Field(default_factory=list)
    answers: bool = False


class _Answer(BaseModel):
    """A process's answer to any other request."""

    step: Step | None
    error: str | None

    @field_validator("step")
    @classmethod
    def _files_are_text(cls, step: Step | None) -> Step | None:
        files = [] if step is None else [file for each in step.media.values() for file in each]
        if not all(isinstance(file, str) for file in files):
            raise ValueError("pictures and clips of a worker are base64 text")
        return step


class _Again(Exception):
    """Raised when an episode of a lost process cannot be replayed; the text says why."""

    def __init__(self, why: str) -> None:
        super().__init__(f"its process was lost, and when it was played again {why}")


@dataclass(eq=False)
class _Record:
    """One episode, with all that is needed to replay it."""

    key: int
    row: bytes
    """Columns of the row, pickled."""
    seed: int
    slot: _Slot
    turns: list[Turn] = field(default_factory=list)
    """Turns that were answered."""
    steps: list[Step] = field(default_factory=list)
    """The opening, then the answer to each turn."""
    seconds: float = 0.0
    """Time spent in its environment so far."""
    process_number: int = 0
    """Number, within its slot, of the process that has the environment. 0: none has."""


class _Job(NamedTuple):
    record: _Record
    verb: Literal["open", "step", "finish"]
    turn: Turn | None = None


class EnvironmentPool:
    """The environments' processes, `config.processes` in number. Use it from one thread only."""

    def __init__(self, config: EnvironmentConfig) -> None:
        """Start the first process and load the environment's code.

        Raises ConfigError or ResourceError.
        """
        self.config = config
        num_processes = config.processes or len(os.sched_getaffinity(0))
        self._memory_bytes = memory_of_each(num_processes, config.max_memory_gib)
        self._replies = queue.SimpleQueue[Reply | QuiverError]()
        self._records: dict[int, _Record] = {}
        self._num_opened = 0
        self._slots = [_Slot(self) for _ in range(num_processes)]
        try:
            self.loaded = self._slots[0].start()
        except BaseException:
            self.close()
            raise
        for slot in self._slots:
            slot.thread.start()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, row: Row, seed: int) -> int:
        """Begin an episode in the process with the fewest, and return its key."""
        self._num_opened += 1
        counts = dict.fromkeys(self._slots, 0)
        for record in self._records.values():
            counts[record.slot] += 1
        slot = min(counts, key=counts.get)
        pickled = pickle.dumps(row, pickle.HIGHEST_PROTOCOL)
        record = _Record(self._num_opened, pickled, seed, slot)
        self._records[record.key] = record
        slot.jobs.put(_Job(record, "open"))
        return record.key

    def step(self, key: int, turn: Turn) -> None:
        """Request an answer to a turn."""
        record = self._records[key]
        record.slot.jobs.put(_Job(record, "step", turn))

    def finish(self, key: int) -> None:
        """Request the reward of the whole episode; its process then closes the environment."""
        record = self._records[key]
        record.slot.jobs.put(_Job(record, "finish"))

    def replies(self, wait: float | None = 0.0) -> list[Reply]:
        """Return the answers that arrived since the last call.

        Args:
            wait: Seconds to wait for the first answer if there is none yet. None: no limit.

        Raises:
            QuiverError: The pool cannot continue.
        """
        replies: list[Reply] = []
        try:
            while True:
                timeout = 0.0 if replies else wait
                reply = self._replies.get(timeout != 0.0, timeout or None)
                if isinstance(reply, QuiverError):
                    raise reply
                if reply.failure is not None:
                    self._records.pop(reply.key, None)
                replies.append(reply)
        except queue.Empty:
            return replies

    def holds(self, key: int) -> bool:
        """True if the episode is neither forgotten nor failed."""
        return key in self._records

    def forget(self, key: int) -> None:
        """Drop an episode whose `finish` has been answered."""
        self._records.pop(key, None)

    def close(self) -> None:
        """Kill all processes and those that they started."""
        for slot in self._slots:
            slot.close()

    def answered(self, reply: Reply | QuiverError) -> None:
        """Queue an answer or an error; called from the thread of a process."""
        self._replies.put(reply)

    def new_process(self) -> UserProcess:
        """Start another process. Raises ResourceError."""
        allowance = f"an environment's process may have {self._memory_bytes / 2**30:.3g} GiB, "
        return UserProcess(
            environment_process.__name__,
            self._memory_bytes,
            name="environment worker",
            allowance=allowance + "generate.turns.max_memory_gib",
            lower="generate.turns.processes",
        )


class _Slot:
    """A place for one process, which is replaced when lost, and the thread that serves it."""

    def __init__(self, pool: EnvironmentPool) -> None:
        self.jobs = queue.SimpleQueue[_Job | None]()
        self.thread = threading.Thread(target=self._serve, daemon=True, name="environments")
        self._pool = pool
        self._process: UserProcess | None = None
        self._process_number = 0
        self._lock = threading.Lock()
        self._is_closing = False

    def start(self) -> Loaded:
        """Start a process, load the environment's code in it, and return its answer.

        Raises:
            ConfigError: The code cannot be loaded, or its fingerprint changed.
            ResourceError: Signals ended several processes, or the pool is closed.
        """
        config = self._pool.config
        name = f"generate.turns {printable(', '.join(config.sources))}"
        options = config.model_dump(include={"environment", "tools", "arguments"})
        attempt = 0
        while True:
            attempt += 1
            with self._lock:
                if self._is_closing:
                    raise ResourceError(name, "its workers were closed", next="run again")
                process = self._process = self._pool.new_process()
            self._process_number += 1
            try:
                return process.load(
                    options,
                    Loaded,
                    title=name,
                    expected=config.fingerprint,
                    attempt=attempt,
                )
            except (Killed, QuiverError) as error:
                process.log_printed(log, "environment")
                self._lose_process()
                if isinstance(error, QuiverError):
                    raise

    def close(self) -> None:
        """Kill the process and join the thread."""
        with self._lock:
            self._is_closing = True
            if self._process is not None:
                self._process.kill()
        self.jobs.put(None)
        if self.thread.is_alive():
            self.thread.join()
        self._lose_process()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None and not self._is_closing:
            try:
                self._pool.answered(self._do(job))
            except BaseException as error:
                if not isinstance(error, QuiverError):
                    error = QuiverError("environments", f"{type(error).__name__}: {error}")
                self._pool.answered(error)

    def _do(self, job: _Job) -> Reply:
        """Return the reply to a job; failures of the episode are part of it.

        A process can be killed for reasons other than its environments, so a job whose process
        ended is tried once more with another.
        """
        record = job.record
        config = self._pool.config
        seconds_left = config.episode_seconds - record.seconds
        limit = min(config.step_seconds, seconds_left)
        late_key = "episode_seconds" if seconds_left < config.step_seconds else "step_seconds"
        is_late = f"no answer within generate.turns.{late_key} {getattr(config, late_key):g}"
        if limit <= 0:
            return Reply(record.key, Step(), 0.0, "timeout", is_late)
        for attempt in range(1, _ATTEMPTS + 1):
            started = time.monotonic()
            try:
                self._bring_back(record)
                started = time.monotonic()
                answer = self._ask(record, job, limit)
                break
            except _Again as error:
                return Reply(record.key, Step(), 0.0, "environment_error", str(error))
            except Late:
                seconds = time.monotonic() - started
                return Reply(record.key, Step(), seconds, "timeout", is_late)
            except Ended as error:
                if attempt == _ATTEMPTS:
                    why = f"its process {error}, {attempt} times"
                    seconds = time.monotonic() - started
                    return Reply(record.key, Step(), seconds, "environment_error", why)
        seconds = time.monotonic() - started
        record.seconds += seconds
        if answer.error is not None:
            return Reply(record.key, Step(), seconds, "environment_error", answer.error)
        if job.verb == "open":
            record.process_number = self._process_number
        if job.verb != "finish":
            record.steps.append(answer.step)
        if job.turn is not None:
            record.turns.append(job.turn)
        return Reply(record.key, answer.step, seconds)

    def _bring_back(self, record: _Record) -> None:
        """Ensure that the current process has the record's environment; replay it if it was lost.

        Raises _Again if the replay differs or fails, Ended if the process ends.
        """
        if self._process is None:
            self.start()
        if record.process_number == self._process_number:
            return
        jobs = [_Job(record, "open"), *(_Job(record, "step", turn) for turn in record.turns)]
        # steps are empty if the opening itself has not been answered yet
        for job, expected in zip(jobs, record.steps, strict=False):
            try:
                answer = self._ask(record, job, self._pool.config.step_seconds)
            except Late:
                raise _Again("it took too long") from None
            if answer.error is not None:
                raise _Again(answer.error)
            if answer.step._replace(info=None) != expected._replace(info=None):
                raise _Again(
                    "it answered differently: the environment depends on more than seed, row and "
                    "turns"
                )
        record.process_number = self._process_number

    def _ask(self, record: _Record, job: _Job, seconds: float) -> _Answer:
        """Ask the process once. Raises Late or Ended, after which the process is gone."""
        request: dict[str, Any] = {"key": record.key, "verb": job.verb}
        if job.verb == "open":
            request |= {"row": record.row, "seed": record.seed}
        elif job.turn is not None:
            calls = [tuple(call) for call in job.turn.calls]
            request["turn"] = {"text": job.turn.text, "calls": calls}
        process = self._process
        try:
            answer = process.ask(request, seconds, _Answer)
            if (answer.step is None) == (answer.error is None):
                raise Ended("ended after an answer that cannot be read")
            return answer
        except (Late, Ended):
            self._lose_process()
            raise
        finally:
            process.log_printed(log, "environment")

    def _lose_process(self) -> None:
        with self._lock:  # `close` may kill the process from another thread
            lost_process = self._process
            self._process = None
        if lost_process is not None:
            lost_process.end()
