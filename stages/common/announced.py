"""A checkpoint that is not committed yet, but whose model is whole: flushed and hashed, and not to
change any more.

Its maker says so in a file beside the staging folder; it is a manifest of the model's files alone.
A reader has the folder itself open, so that its path stays good when the commit renames it. Nothing
that was made of an announced checkpoint counts before the committed one was seen to hold the same
files (`holds`): the maker may fail yet.
"""

from __future__ import annotations

import os
from pathlib import Path

from quiver.schemas.manifest import from_json
from quiver.schemas.refs import Ref

from .store import Version

NAME = "announced.json"


def look(path: Path, since: float) -> Version | None:
    """The checkpoint that `path` announces since that time (of the Unix clock); None where there is
    none, or no longer."""
    try:
        if path.stat().st_mtime < since:
            return None  # by an attempt that died
        found = from_json(path.read_bytes(), path.name)
        handle = os.open(path.parent.with_suffix(""), os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None  # committed meanwhile
    version = Version(
        Ref(found.run, found.kind, found.version), Path(f"/proc/{os.getpid()}/fd/{handle}")
    )
    version.manifest = found
    return version


def holds(committed: Version, announced: Version) -> bool:
    """Whether the model of `committed` is the one that was announced, file by file."""
    return {entry for entry in committed.manifest.files if "/" not in entry.name} == set(
        announced.manifest.files
    )
