"""One way to start, feed, limit, read and end a process with all that it started.

    with Process([sys.executable, "-u", "script.py"], stdin=PIPE, stdout=PIPE) as process:
        process.stdin.write(b"...")
        for line in process.lines(timeout=60):
            ...

Nobody is left behind: not when the block is left, not when this process dies (by kill -9 too), not
in another session than the command's. A keeper (`keeper`) sees to it, between this process and the
command.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quiver.stages.common.runtime import keeper

GRACE_SECONDS = 5.0
_LAST_SECONDS = 15.0
_LONGEST_LINE = 64 * 1024
log = logging.getLogger(__name__)


class Stopped(BaseException):
    """Whoever waits for a process wants it no longer; it was ended."""


class Process(subprocess.Popen):
    """A command with its keeper, which ends as the command does; else as subprocess.Popen.

    `limits`: of setrlimit(2), for each process, by `resource.RLIMIT_...`. `oom_score`: the higher,
    the sooner the kernel kills it when memory runs out, up to 1000. `orphan_grace`: how many
    seconds the command has to end by itself when this process has died; 0: it is killed at once.
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
        """Have it killed with all that it started; from any thread. They are gone when `wait`
        returns."""
        with self._lock:
            if self._lifeline is not None:
                os.close(self._lifeline)
                self._lifeline = None

    def end(self, grace: float | None = None) -> int:
        """Its exit code, once it and all that it started are gone: SIGTERM, SIGKILL after `grace`
        seconds (None: GRACE_SECONDS; 0: at once)."""
        grace = GRACE_SECONDS if grace is None else grace
        try:
            if grace and self.poll() is None:
                self.terminate()
                self.wait(grace)
        except subprocess.TimeoutExpired:
            # it may be deep in a library's code, and nothing of it is wanted any more
            log.debug("process %d is killed: it did not end within %g s", self.pid, grace)
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
        """Lines of its stdout as they come; of a progress bar that rewrites its line only the last
        state. TimeoutError after `timeout` seconds, Stopped when `stopped()`.

        They end with the process, or once `until()` is true and what was printed before that is
        read. Of a line longer than _LONGEST_LINE only the end is kept.
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
            if poll.poll(0 if is_over else 200):
                chunk = os.read(self.stdout.fileno(), 65536)
            elif is_over or self.poll() is not None:
                chunk = b""  # or it was killed with its keeper, and something is left of it
            else:
                continue
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            for raw in lines if chunk else [*lines, unfinished]:
                line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
                if line.strip():
                    yield line
            unfinished = unfinished[-_LONGEST_LINE:]
