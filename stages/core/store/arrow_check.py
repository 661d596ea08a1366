"""Check that an Arrow file can be parsed, without parsing it in this process.

with ArrowCheck() as check:
    problem = check.problem(path)    # "" if it can be parsed
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from quiver.schemas.errors import CorruptError, printable
from quiver.schemas.manifest import FileEntry
from quiver.stages.core.processes.scripts import AskedScript

from . import arrow_child

_MOST_BYTES = 2**40
"""Address space of the child process; files are mapped, so it bounds their size too."""
_parsed_hashes: set[str] = set()
"""sha256 of each file from another user's store that a child process has parsed."""


class ArrowCheck(AbstractContextManager):
    """A child process that parses files. Started for the first file and again after a crash."""

    def __init__(self) -> None:
        self._script = AskedScript(Path(arrow_child.__file__), _MOST_BYTES)

    def __exit__(self, *error: object) -> None:
        self._script.close()

    def problem(self, path: Path) -> str:
        """Return why the file cannot be parsed, or an empty string if it can."""
        request = json.dumps(str(path)).encode() + b"\n"
        late = f"it was not parsed within {arrow_child.MOST_SECONDS} s"
        return printable(self._script.ask(request, late).get("error", ""))


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
