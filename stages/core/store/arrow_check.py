"""Check that an Arrow file can be parsed, without parsing it in this process.

with ArrowCheck() as check:
    problem = check.problem(path)    # "" if it can be parsed
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from quiver.schemas.errors import CorruptError, printable
from quiver.schemas.manifest import FileEntry
from quiver.stages.core.run.subprocesses import Process

from . import arrow_child

_SECONDS = 60.0
_parsed_hashes: set[str] = set()
"""sha256 of each file from another user's store that a child process has parsed."""


class ArrowCheck(AbstractContextManager):
    """A child process that parses files. Started for the first file and again after a crash."""

    def __init__(self) -> None:
        self._child: Process | None = None

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.end(0)
            self._child = None

    def problem(self, path: Path) -> str:
        """Return why the file cannot be parsed, or an empty string if it can."""
        if self._child is None:
            self._child = Process(
                [sys.executable, "-I", arrow_child.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        try:
            self._child.stdin.write(json.dumps(str(path)).encode() + b"\n")
            self._child.stdin.flush()
            line = next(self._child.lines(timeout=_SECONDS), None)
        except TimeoutError:
            self.end()
            return f"it was not parsed within {_SECONDS:g} s"
        if line is not None:
            return printable(json.loads(line))
        code = self._child.wait()
        self.end()
        return f"whoever parses it crashes (exit code {code})"


def require_parseable(
    folder: Path, entries: Iterable[FileEntry], corrupt: Callable[[str, str], CorruptError]
) -> None:
    """Have a child process parse the files in `folder`, each content hash once per process.

    Args:
        corrupt: makes the error from a file's name and the problem with it.

    Raises:
        CorruptError: made by `corrupt`, if a file cannot be parsed.
    """
    with ArrowCheck() as arrow_check:
        for entry in entries:
            if entry.sha256 not in _parsed_hashes:
                problem = arrow_check.problem(folder / entry.name)
                if problem:
                    raise corrupt(entry.name, f"cannot be parsed: {problem}")
                _parsed_hashes.add(entry.sha256)
