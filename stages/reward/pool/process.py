"""One worker process as the stage sees it: requests go out, answers and printed text come in, each
wait has an end.

    worker = Worker(memory_gib=None)
    worker.send({"load": {"use": "numeric", "name": "numeric", "arguments": {}, "key": 0}})
    worker.receive(seconds=60)                         # {"about": …}; Late, Ended
    worker.end()                                       # it, and all that it started, is gone

What a function prints is always drained, and kept up to PRINTED_BYTES between two calls of
`printed`.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.subprocesses import Process
from quiver.stages.reward.pool import worker
from quiver.stages.reward.pool.worker import LENGTH

PRINTED_BYTES = 4096
_PIPE_BYTES = 1 << 20
_ANSWER_BYTES = 256 << 20  # more than any number of rows needs


class Late(Exception):
    """No answer in time."""


class Ended(Exception):
    """The process ended; the text says how."""


class Worker:
    """A worker process (see `worker`). One thread uses it; another may `kill` it."""

    def __init__(self, memory_gib: float | None) -> None:
        self.grown: dict[int, int] = {}
        """By the key of each function that it has loaded: most rows that a call of it had here."""
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._text = bytearray()
        self._dropped_bytes = 0
        limits = {resource.RLIMIT_CORE: 0}
        if memory_gib is not None:
            limits[resource.RLIMIT_DATA] = int(memory_gib * 2**30)
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            requests_read, self._requests, self._answers, answers_write = pipes
            worker_ends = (requests_read, answers_write)
            self._process = Process(
                [sys.executable, "-P", worker.__file__, *map(str, worker_ends)],
                limits=limits,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=worker_ends,
            )
        except OSError as error:
            for handle in pipes:
                os.close(handle)
            raise ResourceError(
                "reward worker", f"can not be started: {error}", next="lower reward.workers"
            ) from error
        for handle in worker_ends:
            os.close(handle)
        self._printed = self._process.stdout.fileno()
        for handle in (self._requests, self._answers, self._printed):
            os.set_blocking(handle, False)
            with suppress(OSError):  # the system's limit on pipes; then they stay as they are
                fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self.send({"path": list(filter(None, sys.path))})

    def send(self, request: dict[str, Any]) -> None:
        """Put a request on its way; it goes out as `receive` waits."""
        self._outgoing += pickle.dumps(request, pickle.HIGHEST_PROTOCOL)

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer. Late after `seconds`, Ended when the process does."""
        deadline = time.monotonic() + seconds
        while (answer := self._take()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise Late
            self._turn(remaining)
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
        os.close(self._requests)
        os.close(self._answers)

    # -- pipes

    def _turn(self, seconds: float) -> None:
        """Wait for one of the pipes and move what can be moved."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        poll.register(self._printed, select.POLLIN)
        if self._outgoing:
            poll.register(self._requests, select.POLLOUT)
        events = dict(poll.poll(seconds * 1000))
        if self._requests in events:
            with suppress(BrokenPipeError):  # its end is read from the answers
                written = os.write(self._requests, self._outgoing[:_PIPE_BYTES])
                del self._outgoing[:written]
        if events.get(self._printed, 0) & select.POLLIN:
            self._drain()
        if self._answers in events:
            chunk = os.read(self._answers, _PIPE_BYTES)
            if not chunk:
                self._drain()
                code = self._process.wait()
                if -code in set(signal.Signals):
                    raise Ended(f"by {signal.Signals(-code).name}")
                raise Ended(f"with exit code {code}")
            self._incoming += chunk

    def _take(self) -> dict[str, Any] | None:
        """The next whole answer of what came in."""
        if len(self._incoming) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._incoming)
        if size > _ANSWER_BYTES:
            raise Ended(f"after an answer of {size} bytes")
        end = LENGTH.size + size
        if len(self._incoming) < end:
            return None
        answer = self._incoming[LENGTH.size : end]
        del self._incoming[:end]
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            raise Ended("after an answer that can not be read") from None

    def _drain(self) -> None:
        """Read what was printed, to the end or to one pipe's worth; only the start is kept."""
        with suppress(BlockingIOError):
            chunk = os.read(self._printed, _PIPE_BYTES)
            room = max(0, PRINTED_BYTES - len(self._text))
            self._text += chunk[:room]
            self._dropped_bytes += max(0, len(chunk) - room)
