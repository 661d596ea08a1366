"""One worker process as the stage sees it: requests go out, answers and printed text come in, each
wait has an end.

    worker = Worker(memory_gib=None)
    worker.ask({"load": {…}, "path": […]}, seconds=60)     # {"about": …}; Late, Ended
    worker.end()                                           # it, and all that it started, is gone

What a function prints is always drained, and kept up to PRINTED_BYTES between two calls of
`printed`.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from multiprocessing import connection
from typing import Any

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.subprocesses import Process
from quiver.stages.reward.pool import worker

PRINTED_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_ANSWER_BYTES = 256 << 20  # more than any number of rows needs


class Late(Exception):
    """No answer in time."""


class Ended(Exception):
    """The process ended; the text says how."""


class Worker:
    """A worker process (see `worker`). One thread uses it; another may `kill` it."""

    def __init__(self, memory_gib: float | None) -> None:
        self.last_calls: dict[int, tuple[int, float]] = {}
        """By the key of each function that it has loaded: rows and seconds of its last call here;
        no rows before the first."""
        self._text = bytearray()
        self._dropped_bytes = 0
        limits = {resource.RLIMIT_CORE: 0}
        if memory_gib is not None:
            limits[resource.RLIMIT_DATA] = int(memory_gib * 2**30)
        try:
            self._connection, workers_end = connection.Pipe()
            with workers_end:
                handle = workers_end.fileno()
                self._process = Process(
                    [sys.executable, "-P", worker.__file__, str(handle)],
                    limits=limits,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[handle],
                )
        except OSError as error:
            raise ResourceError(
                "reward worker", f"can not be started: {error}", next="lower reward.workers"
            ) from error
        self._printed = self._process.stdout.fileno()
        os.set_blocking(self._printed, False)

    def ask(self, request: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """The answer to a request; None: the next piece of the answer to the one before. Late after
        `seconds`, Ended when the process does; it is of no further use then."""
        is_late = threading.Event()

        def give_up() -> None:
            is_late.set()
            self.kill()

        watchdog = threading.Timer(seconds, give_up)
        watchdog.daemon = True
        watchdog.start()
        try:
            if request is not None:
                self._connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            while self._connection not in connection.wait([self._connection, self._printed]):
                self._drain()
            answer = json.loads(self._connection.recv_bytes(_ANSWER_BYTES))
        except (EOFError, OSError):
            self.kill()  # where its answer was too long
            code = self._process.wait()
            if is_late.is_set():
                raise Late from None
            if -code in set(signal.Signals):
                raise Ended(f"by {signal.Signals(-code).name}") from None
            raise Ended(f"with exit code {code}") from None
        except (ValueError, RecursionError):
            raise Ended("after an answer that can not be read") from None
        finally:
            watchdog.cancel()
            self._drain()
        return answer

    def printed(self) -> str:
        """The first PRINTED_BYTES of what was printed since the last call."""
        text = self._text.decode(errors="replace")
        if self._dropped_bytes:
            text += f"\n… and {self._dropped_bytes} bytes more"
        self._text.clear()
        self._dropped_bytes = 0
        return text

    def kill(self) -> None:
        """Have it killed with all that it started; from any thread."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, wait until it is gone, and let go of the pipes."""
        self._process.end(grace=0)
        self._connection.close()

    def _drain(self) -> None:
        """Read what was printed, to the end or to one pipe's worth; only the start is kept."""
        with suppress(BlockingIOError):
            chunk = os.read(self._printed, _CHUNK_BYTES)
            room = max(0, PRINTED_BYTES - len(self._text))
            self._text += chunk[:room]
            self._dropped_bytes += max(0, len(chunk) - room)
