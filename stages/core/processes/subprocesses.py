"""Start, limit, read and end a child process together with everything that it starts.

    with Process([sys.executable, "-u", "script.py"], stdin=PIPE, stdout=PIPE) as process:
        process.stdin.write(b"...")
        for line in process.lines(timeout=60):
            ...

No descendant survives: neither the end of the block, nor the death of this process (even by kill
-9), nor by moving to another session. A keeper process between this process and the command ensures
it (see `keeper`).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quiver.stages.core.processes import keeper

GRACE_SECONDS = 5.0
_LAST_SECONDS = 15.0
_LONGEST_LINE = 64 * 1024
log = logging.getLogger(__name__)


class Stopped(BaseException):
    """Raised in a process that no longer wants to wait for a child; the child was ended."""


def ending(code: int, hint: str = "out of memory?") -> str:
    """Return how a process ended: "with exit code 3", or "by SIGKILL (out of memory?)"."""
    if -code not in set(signal.Signals):
        return f"with exit code {code}"
    name = signal.Signals(-code).name
    # SIGABRT: C++ could not get memory
    return f"by {name} ({hint})" if name in ("SIGKILL", "SIGABRT") else f"by {name}"


class Process(subprocess.Popen):
    """A command with its keeper, which ends as the command does; otherwise like subprocess.Popen.

    Args:
        limits: limits for each process, as in setrlimit(2), by `resource.RLIMIT_...`.
        oom_score: up to 1000; when memory runs out, the kernel kills higher scores first.
        orphan_grace: seconds the command has to end by itself after this process dies. 0: it is
            killed at once.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        limits: Mapping[int, int] | None = None,
        oom_score: int | None = None,
        orphan_grace: float = 0,
        pass_fds: Sequence[int] = (),
        **options: Any,
    ) -> None:
        if shutil.which(args[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), args[0])
        self._lock = threading.Lock()
        lifeline, self._lifeline = os.pipe()
        limit_text = ",".join(f"{kind}={number}" for kind, number in (limits or {}).items())
        command = [sys.executable, "-I", "-S", keeper.__file__]
        oom_text = "" if oom_score is None else str(oom_score)
        command += [str(lifeline), str(orphan_grace), limit_text, oom_text, *args]
        try:
            super().__init__(
                command, pass_fds=(*pass_fds, lifeline), start_new_session=True, **options
            )
        except BaseException:
            self.kill()
            raise
        finally:
            os.close(lifeline)

    def kill(self) -> None:
        """Kill it with all that it started, from any thread. They are gone when `wait` returns."""
        with self._lock:
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None

    def end(self, grace: float | None = None) -> int:
        """End it and all that it started, and return its exit code.

        Args:
            grace: seconds between SIGTERM and SIGKILL; 0 sends SIGKILL at once. Default:
                GRACE_SECONDS.
        """
        grace = GRACE_SECONDS if grace is None else grace
        try:
            if grace and self.poll() is None:
                self.terminate()
                self.wait(grace)
        except subprocess.TimeoutExpired:
            # it may be deep in a library's code, and its result is no longer needed
            log.debug("killing process %d: it did not end within %g s", self.pid, grace)
        finally:  # a second signal must not keep the lifeline open
            self.kill()
            try:
                self.wait(_LAST_SECONDS)
            except subprocess.TimeoutExpired:  # the keeper was stopped; the command dies with it
                super().kill()
            for pipe in (self.stdin, self.stdout, self.stderr):
                with suppress(BrokenPipeError):
                    if pipe:
                        pipe.close()
        return self.wait()

    def __exit__(self, *error: object) -> None:
        self.end()

    def lines(
        self,
        timeout: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
        until: Callable[[], bool] = lambda: False,
    ) -> Iterator[str]:
        """Yield the lines of its stdout as they come.

        The lines end with the process, or once `until()` is true and everything printed before is
        read. For a progress bar that rewrites its line, only the last state is kept. A line longer
        than _LONGEST_LINE loses its beginning.

        Raises:
            TimeoutError: it is still running after `timeout` seconds.
            Stopped: `stopped()` is true.
        """
        deadline = time.monotonic() + timeout if timeout else None
        poll = select.poll()
        poll.register(self.stdout)
        unfinished = b""
        chunk = None
        while chunk != b"":
            if stopped():
                raise Stopped
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"still running after {timeout:g} s")
            is_over = until()
            # 200 ms, so that `stopped` and `until` are polled
            if poll.poll(0 if is_over else 200):
                chunk = os.read(self.stdout.fileno(), 65536)
            elif is_over or self.poll() is not None:
                # or it was killed with its keeper, and a descendant still holds the pipe
                chunk = b""
            else:
                continue
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            for raw in lines if chunk else [*lines, unfinished]:
                line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
                if line.strip():
                    yield line
            unfinished = unfinished[-_LONGEST_LINE:]
