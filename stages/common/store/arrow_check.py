"""Whether an Arrow file can be parsed, told without parsing it in this process.

with ArrowCheck() as check:
    problem = check.problem(path)    # "" where it can be
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from quiver.schemas.errors import CorruptError, printable
from quiver.schemas.manifest import FileEntry
from quiver.stages.common.runtime.subprocesses import Process

from . import arrow_child

_SECONDS = 60.0
_parsed_hashes: set[str] = set()
"""Files of somebody else's stores that a child process has parsed, by their sha256."""


class ArrowCheck:
    """A child process that parses; started with the first file, and anew after it crashed."""

    def __init__(self) -> None:
        self._child: Process | None = None

    def __enter__(self) -> ArrowCheck:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end(0)
            self._child = None

    def problem(self, path: Path) -> str:
        """What is wrong with the file; empty where it can be parsed."""
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
    """Let a child process parse files in `folder`, each once. Raises what `corrupt` makes of a
    file's name and what is wrong with it."""
    with ArrowCheck() as arrow_check:
        for entry in entries:
            if entry.sha256 not in _parsed_hashes:
                problem = arrow_check.problem(folder / entry.name)
                if problem:
                    raise corrupt(entry.name, f"cannot be parsed: {problem}")
                _parsed_hashes.add(entry.sha256)
