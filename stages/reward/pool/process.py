"""One worker process as the stage sees it: requests go out, answers and printed text come in, each
wait has an end.

    worker = Worker(memory_gib=None)
    worker.ask({"key": 1, "load": {…}, "path": […]}, 60, Loaded)    # or Late, Ended
    worker.end()                                # it, and all that it started, is gone

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
import time
from contextlib import suppress
from multiprocessing import connection
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.subprocesses import Process
from quiver.stages.common.store.failpoints import failpoint
from quiver.stages.reward.pool import worker
from quiver.stages.reward.pool.calls import About
from quiver.stages.reward.scoring import LARGEST

PRINTED_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_ANSWER_BYTES = 256 << 20  # more than any number of rows needs


class Late(Exception):
    """No answer in time."""


class Ended(Exception):
    """The process ended; the text says how."""


class Loaded(BaseModel):
    """What a worker says of a function that it was to load."""

    about: About | None
    error: dict[str, str] | None
    """Why it could not be loaded."""


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
    seconds: Annotated[float, Field(ge=0)] | None
    """Of the whole call; None: more pieces come."""


_Kind = TypeVar("_Kind", bound=BaseModel)


class Worker(Process):
    """A worker process (see `worker`). One thread uses it; another may `kill` it."""

    def __init__(self, memory_gib: float | None) -> None:
        self.last_calls: dict[Any, tuple[int, float]] = {}
        """By each function that it has loaded: rows and seconds of its last call here; no rows
        before the first."""
        self._text = bytearray()
        self._dropped_bytes = 0
        limits = {resource.RLIMIT_CORE: 0}
        if memory_gib is not None:
            limits[resource.RLIMIT_DATA] = int(memory_gib * 2**30)
        try:
            self._connection, workers_end = connection.Pipe()
            with workers_end:
                handle = workers_end.fileno()
                super().__init__(
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
        self._printed = self.stdout.fileno()
        os.set_blocking(self._printed, False)

    def ask(self, request: dict[str, Any] | None, seconds: float, kind: type[_Kind]) -> _Kind:
        """The answer to a request; None: the next piece of the answer to the one before. Late after
        `seconds`, Ended when the process does or its answer is no `kind`; it is of no further use
        then."""
        deadline = time.monotonic() + seconds
        watchdog = threading.Timer(seconds, self.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            if request is not None:
                self._connection.send_bytes(pickle.dumps(request, pickle.HIGHEST_PROTOCOL))
            while self._connection not in connection.wait([self._connection, self._printed]):
                self._drain()
            answer = self._connection.recv_bytes(_ANSWER_BYTES)
            failpoint("reward.answered")
            return kind.model_validate(json.loads(answer))
        except (EOFError, OSError):
            is_late = time.monotonic() >= deadline
            self.kill()  # where its answer was too long
            code = self.wait()
            if is_late:
                raise Late from None
            if -code in set(signal.Signals):
                raise Ended(f"by {signal.Signals(-code).name}") from None
            raise Ended(f"with exit code {code}") from None
        except (ValueError, RecursionError):
            raise Ended("after an answer that can not be read") from None
        finally:
            watchdog.cancel()
            self._drain()

    def printed(self) -> str:
        """The first PRINTED_BYTES of what was printed since the last call."""
        text = self._text.decode(errors="replace")
        if self._dropped_bytes:
            text += f"\n… and {self._dropped_bytes} bytes more"
        self._text.clear()
        self._dropped_bytes = 0
        return text

    def end(self, grace: float | None = 0) -> int:
        """As that of every Process, but at once; it lets go of the connection too."""
        code = super().end(grace)
        self._connection.close()
        return code

    def _drain(self) -> None:
        """Read what was printed, to the end or to one pipe's worth; only the start is kept."""
        with suppress(BlockingIOError):
            chunk = os.read(self._printed, _CHUNK_BYTES)
            room = max(0, PRINTED_BYTES - len(self._text))
            self._text += chunk[:room]
            self._dropped_bytes += max(0, len(chunk) - room)
