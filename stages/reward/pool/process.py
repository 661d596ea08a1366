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
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from quiver.schemas.errors import ResourceError
from quiver.stages.reward.pool import worker
from quiver.stages.reward.pool.worker import LENGTH

PRINTED_BYTES = 4096
_PIPE_BYTES = 1 << 20
_ANSWER_BYTES = 256 << 20  # more than any number of rows needs
_END_SECONDS = 5.0


class Late(Exception):
    """No answer in time."""


class Ended(Exception):
    """The process ended; the text says how."""


class Worker:
    """A worker process with its keeper (see `worker`). One thread uses it; another may `kill`
    it."""

    def __init__(self, memory_gib: float | None) -> None:
        self.grown: dict[int, int] = {}
        """By the key of each function that it has loaded: most rows that a call of it had here."""
        self._out, self._in, self._text, self._unsaid = bytearray(), bytearray(), bytearray(), 0
        self._lock = threading.Lock()
        pipes: list[tuple[int, int]] = []
        try:
            pipes.extend(os.pipe() for _ in range(4))
            requests, answers, lifeline, printed = pipes
            theirs = (requests[0], answers[1], lifeline[0])
            self._process = subprocess.Popen(
                [sys.executable, "-P", worker.__file__, *map(str, theirs)],
                stdin=subprocess.DEVNULL,
                stdout=printed[1],
                stderr=subprocess.STDOUT,
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError as error:
            for handle in (handle for pipe in pipes for handle in pipe):
                os.close(handle)
            raise ResourceError(
                "reward worker", f"can not be started: {error}", next="lower reward.workers"
            ) from error
        for handle in (*theirs, printed[1]):
            os.close(handle)
        self._requests, self._answers, self._printed = requests[1], answers[0], printed[0]
        self._lifeline: int | None = lifeline[1]
        for handle in (self._requests, self._answers, self._printed):
            os.set_blocking(handle, False)
            with suppress(OSError):  # the system's limit on pipes; then they stay as they are
                fcntl.fcntl(handle, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        path = [each for each in sys.path if each]
        self.send({"path": path, "bytes": None if memory_gib is None else int(memory_gib * 2**30)})

    def send(self, request: dict[str, Any]) -> None:
        """Put a request on its way; it goes out as `receive` waits."""
        data = pickle.dumps(request, pickle.HIGHEST_PROTOCOL)
        self._out += LENGTH.pack(len(data))
        self._out += data

    def receive(self, seconds: float) -> dict[str, Any]:
        """The next answer. Late after `seconds`, Ended when the process does."""
        deadline = time.monotonic() + seconds
        while (answer := self._take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late
            self._turn(left)
        self._drain()
        return answer

    def printed(self) -> str:
        """The first PRINTED_BYTES of what was printed since the last call."""
        text = self._text.decode(errors="replace") + (
            f"\n… and {self._unsaid} bytes more" if self._unsaid else ""
        )
        self._text, self._unsaid = bytearray(), 0
        return text

    def kill(self) -> None:
        """Have it killed with all that it started; from any thread."""
        with self._lock:
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None

    def end(self) -> None:
        """Kill it, wait until it is gone, and let go of the pipes."""
        self.kill()
        self._wait()
        for handle in (self._requests, self._answers, self._printed):
            os.close(handle)

    # -- pipes

    def _turn(self, seconds: float) -> None:
        """Wait for one of the pipes and move what can be moved."""
        events = select.poll()
        events.register(self._answers, select.POLLIN)
        events.register(self._printed, select.POLLIN)
        if self._out:
            events.register(self._requests, select.POLLOUT)
        ready = dict(events.poll(seconds * 1000))
        if self._requests in ready:
            with suppress(BrokenPipeError):  # its end is read from the answers
                written = os.write(self._requests, self._out[:_PIPE_BYTES])
                del self._out[:written]
        if ready.get(self._printed, 0) & select.POLLIN:
            self._drain()
        if self._answers in ready:
            data = os.read(self._answers, _PIPE_BYTES)
            if not data:
                self._drain()
                raise Ended(self._how())
            self._in += data

    def _take(self) -> dict[str, Any] | None:
        """The next whole answer of what came in."""
        if len(self._in) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._in)
        if size > _ANSWER_BYTES:
            raise Ended(f"after an answer of {size} bytes")
        if len(self._in) < LENGTH.size + size:
            return None
        data = self._in[LENGTH.size : LENGTH.size + size]
        del self._in[: LENGTH.size + size]
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise Ended("after an answer that can not be read") from None

    def _drain(self) -> None:
        """Read what was printed, to the end or to one pipe's worth; only the start is kept."""
        with suppress(BlockingIOError):
            data = os.read(self._printed, _PIPE_BYTES)
            kept = data[: max(0, PRINTED_BYTES - len(self._text))]
            self._text += kept
            self._unsaid += len(data) - len(kept)

    # -- the end

    def _how(self) -> str:
        code = self._wait()
        number = -code if code < 0 else code - 128
        if number in set(signal.Signals):
            return f"by {signal.Signals(number).name}"
        return f"with exit code {code}"

    def _wait(self) -> int:
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # the keeper itself was stopped; the worker dies with it
            self._process.kill()
            return self._process.wait()
