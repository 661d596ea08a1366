"""A process that runs a user's code: it answers requests, and each wait has a limit.

    limit = memory_of_each(processes=2)
    process = UserProcess(module, limit, name="scorer", allowance="4 GiB", lower="reward.workers")
    process.load({…}, Loaded, title="scorer f")    # or Killed
    process.ask({"key": 1, …}, 60, Answer)      # or Late, Ended
    process.end()                               # it, and all that it started, is gone

`module` has a class Answerer; its method `answer` is called in the process (see `answering`). Its
output is always drained, and up to PRINTED_BYTES are kept between two calls of `log_printed`.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from quiver.schemas.errors import (
    ConfigError,
    QuiverError,
    ResourceError,
    from_dict,
    printable,
    shortage,
)
from quiver.stages.core.processes.subprocesses import Process, ending
from quiver.stages.core.run import answering

LOAD_SECONDS = 120.0
LOAD_ATTEMPTS = 3
"""Processes in a row that a signal may end while they load a user's code."""
PRINTED_BYTES = 4096
OOM_SCORE = 900
"""oom_score of these processes. When memory runs out, the kernel kills them before the stage and
the flow; programs in the sandbox have 1000.
"""
LEAST_MEMORY_BYTES = 4 << 30
"""Smallest share of a process, unless that exceeds half of the machine's memory. Memory that
libraries reserve in advance counts too.
"""
_CHUNK_BYTES = 1 << 20
_ANSWER_BYTES = 256 << 20  # more than any number of rows needs
_Kind = TypeVar("_Kind", bound=BaseModel)
_Load = TypeVar("_Load", bound="Loaded")


class Late(Exception):
    """The answer did not arrive in time; the text says so of the process."""


class Ended(Exception):
    """The process ended; the text says how, such as "ended with exit code 3"."""


class Killed(Ended):
    """A signal ended the process."""


class Surplus(Ended):
    """The process answered an earlier request a second time.

    The answer to this request is unknown, and the process cannot be trusted any more.
    """


class Loaded(BaseModel):
    """The answer to a request to load a user's code."""

    fingerprint: str = ""
    """Hash of the code."""
    error: dict[str, str] | None
    """Reason why it could not be loaded: see `refusal`."""


class _Message(BaseModel):
    """An answer, or a piece of one, and the request that it belongs to."""

    key: int | None
    number: int
    piece: int
    answer: dict[str, Any]


class UserProcess(Process):
    """A process with a user's code, used by one thread; another thread may `kill` it."""

    def __init__(
        self, module: str, memory_bytes: int, *, name: str, allowance: str, lower: str
    ) -> None:
        """Start the process. Raises ResourceError if it cannot be started.

        Args:
            memory_bytes: most private memory that it may have.
            name: its name in error messages.
            allowance: the memory limit as error messages show it.
            lower: the config key that reduces the number of these processes.
        """
        self._text = bytearray()
        self._dropped_bytes = 0
        self._allowance = allowance
        self._lower = lower
        self._key: int | None = None
        self._num_asked = 0
        self._num_pieces = 0
        """Pieces read so far of the answer to the last request."""
        try:
            self._connection, its_end = connection.Pipe()
            with its_end:
                handle = its_end.fileno()
                super().__init__(
                    [sys.executable, "-P", answering.__file__, str(handle)],
                    limits={resource.RLIMIT_CORE: 0, resource.RLIMIT_DATA: memory_bytes},
                    oom_score=OOM_SCORE,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[handle],
                )
        except OSError as error:
            raise ResourceError(
                name, f"cannot be started: {error}", next=f"lower {lower}"
            ) from error
        self._printed = self.stdout.fileno()
        os.set_blocking(self._printed, False)
        with suppress(OSError):  # it has ended already, and the first answer will report it
            self._send({"path": list(filter(None, sys.path)), "module": module})

    def load(
        self,
        options: dict[str, Any],
        kind: type[_Load],
        *,
        title: str,
        key: int | None = None,
        expected: str = "",
        attempt: int = 1,
    ) -> _Load:
        """Let the process load a user's code, and return its answer.

        Args:
            options: what to load, as the module's Answerer knows it.
            kind: model of the answer.
            title: the object of errors.
            expected: the fingerprint that the code must have. Empty: any.
            attempt: number of this process among those that try to load it, from 1.

        Raises:
            ConfigError: the code cannot be loaded, or has another fingerprint.
            Killed: a signal ended the process, so another one may try.
            ResourceError: a signal ended the last process that may try.
            Surplus: the process answered an earlier request twice, so another one may try.
        """
        try:
            answer = self.ask({"key": key, "load": options}, LOAD_SECONDS, kind)
        except (Late, Ended) as error:
            if isinstance(error, Surplus) and self._num_asked > 1:
                raise
            if isinstance(error, Killed) and attempt < LOAD_ATTEMPTS:
                raise
            problem = f"importing it: its process {error}"
            if isinstance(error, Killed):
                problem += f", {attempt} times in a row"
                advice = f"lower {self._lower}, then run again"
                raise ResourceError(title, problem, next=advice) from None
            raise ConfigError(title, problem, next="see what importing it does") from None
        if answer.error:
            raise from_dict(answer.error)
        if expected not in ("", answer.fingerprint):
            raise ConfigError(
                title,
                f"its file changed meanwhile: fingerprint expected {expected}, found "
                f"{answer.fingerprint}",
                state="finished shards are kept.",
                next="run again",
            )
        return answer

    def ask(self, request: dict[str, Any] | None, seconds: float, kind: type[_Kind]) -> _Kind:
        """Send a request and return its answer.

        Args:
            request: its `key` comes back with the answer. None: read the next piece of the
                answer to the request before.
            seconds: longest time to wait.
            kind: model of the answer.

        Raises:
            Late: no answer after `seconds`.
            Ended: the process ended, or its answer is not a `kind`.
            Surplus: the answer belongs to an earlier request.

        After an error the process must not be used again.
        """
        deadline = time.monotonic() + seconds
        # a blocked read has no timeout of its own: killing the process ends it
        watchdog = threading.Timer(seconds, self.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if request is not None:
                self._key = request.get("key")
                self._num_asked += 1
                self._num_pieces = 0
                self._send({"key": self._key, "number": self._num_asked, "request": request})
            while self._connection not in connection.wait([self._connection, self._printed]):
                self._drain()
            received = self._connection.recv_bytes(_ANSWER_BYTES)
            message = _Message.model_validate(json.loads(received))
            expected = (self._key, self._num_asked, self._num_pieces)
            if (message.key, message.number, message.piece) != expected:
                raise Surplus("ended after one answer too many")
            self._num_pieces += 1
            return kind.model_validate(message.answer)
        except (EOFError, OSError):
            is_late = time.monotonic() >= deadline
            self.kill()  # needed if its answer was too long
            code = self.wait()
            if is_late:
                raise Late(f"took longer than {seconds:.3g} s") from None
            error_class = Killed if code < 0 else Ended
            how = ending(code, f"out of memory? {self._allowance}")
            raise error_class(f"ended {how}") from None
        except (ValueError, RecursionError):
            raise Ended("ended after an answer that cannot be read") from None
        finally:
            watchdog.cancel()
            self._drain()

    def log_printed(self, log: logging.Logger, name: str) -> None:
        """Log the lines that it printed since the last call, in its first PRINTED_BYTES."""
        text = self._text.decode(errors="replace")
        if self._dropped_bytes:
            text += f"\n… and {self._dropped_bytes} bytes more"
        self._text.clear()
        self._dropped_bytes = 0
        for line in text.splitlines():
            if line.strip():
                log.info("%s: %s", name, printable(line, 1000))

    def end(self, grace: float | None = 0) -> int:
        """End it like `Process.end`, but at once by default; also close the connection."""
        code = super().end(grace)
        self._connection.close()
        return code

    def _send(self, message: dict[str, Any]) -> None:
        self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _drain(self) -> None:
        """Read its output, up to _CHUNK_BYTES; only the first PRINTED_BYTES are kept."""
        with suppress(BlockingIOError):
            chunk = os.read(self._printed, _CHUNK_BYTES)
            room = max(0, PRINTED_BYTES - len(self._text))
            self._text += chunk[:room]
            self._dropped_bytes += max(0, len(chunk) - room)


def refusal(error: BaseException, title: str, key: str) -> dict[str, str]:
    """Return the error to answer with, in the process, if loading a user's code raised `error`.

    Args:
        title: the object of the error.
        key: the config key that raises the process's memory limit.
    """
    if shortage(error.__cause__) is not None:
        problem = "importing it takes more memory than there is"
        if limit := memory_limit():
            problem += f": its process may have {limit / 2**30:.3g} GiB"
        error = ResourceError(title, problem, next=f"raise {key}")
    elif not isinstance(error, QuiverError):  # SystemExit, say
        problem = f"cannot be loaded: {type(error).__name__}: {printable(error)}"
        error = ConfigError(title, problem, next="see what importing it does")
    return error.to_dict()


def memory_limit() -> int | None:
    """Return the bytes of private memory that this process may have. None: unlimited."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else limit


def memory_of_each(processes: int, gib: float | None = None) -> int:
    """Return the most private memory of each process, in bytes.

    Without `gib` it is an equal share of the machine's memory, with one more share left for
    everything else. A cgroup's limit counts as the machine's memory.
    """
    if gib is not None:
        return int(gib * 2**30)
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        limit_name = "memory.max"
        if controllers:  # cgroup version 1
            root = root / controllers
            limit_name = "memory.limit_in_bytes"
        folder = root / group.lstrip("/")
        for place in (folder, *folder.parents):
            # the group is not visible here, or the limit is "max"
            with suppress(OSError, ValueError):
                machine = min(machine, int((place / limit_name).read_text()))
    return max(machine // (processes + 1), min(LEAST_MEMORY_BYTES, machine // 2))
