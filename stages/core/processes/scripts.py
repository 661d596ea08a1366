"""A script in a child process that answers each request with one line of JSON.

The script limits the time of each answer by its own alarm, so nothing is left running. If a request
ends the child, the next request starts another.

    script = AskedScript(Path("script.py"), memory=2 * 1024**3)
    script.ask(b'{"text": "a"}\\n', "it did not end")     # {"text": …}, or {"error": …}
    script.close()
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from quiver.stages.core.processes.subprocesses import Process


class AskedScript:
    """The script and its child process, which has at most `memory` bytes and writes no core."""

    def __init__(self, script: Path, memory: int) -> None:
        self._command = [sys.executable, "-I", str(script)]
        self._limits = {resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0}
        self._child: Process | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None if none is running."""
        return self._child and self._child.pid

    def close(self) -> None:
        """End the child process and wait for it. No other is started; another thread may ask."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.end(grace=0)

    def ask(self, request: bytes, when_late: str) -> dict[str, Any]:
        """Return the answer to one request.

        If the child ends instead, the answer is {"error": …}: `when_late` if its alarm ended it,
        else its exit code.
        """
        if self._is_closed:
            return {"error": "its process was ended"}
        if self._child is not None and self._child.poll() is not None:  # killed after its answer
            self._end()
        if self._child is None:
            self._child = Process(
                self._command, limits=self._limits, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        child = self._child
        try:
            child.stdin.write(request)
            child.stdin.flush()
            line = child.stdout.readline()
        except (BrokenPipeError, ValueError):  # it ended, or `close` closed the pipes
            line = b""
        if line:
            return json.loads(line)
        code = child.wait()
        self._end()
        memory = self._limits[resource.RLIMIT_AS] // 1024**2
        ended = f"its process ended with code {code} (limit: {memory} MiB of memory)"
        return {"error": when_late if code == -signal.SIGALRM else ended}
