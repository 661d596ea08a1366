"""Notes: small JSON files beside unfinished work, each with a checksum.

They record which shards are finished, how rows are cut into shards, which versions a stage reads,
how far it is, and each process's report. A note with a wrong checksum is ignored, and the work that
it stood for is done again.

Not of the spine: the writer needs to know only that a note is either whole or absent.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import FileEntry

from .storage import Storage, read_checked, size_and_sha256

PROGRESS = "progress"
"""Name of the note that makes a resume state valid."""
SOURCES = "sources"
"""Name of the note that lists the versions the stage reads."""
WORK = re.compile(r"([0-9a-f]{64})\.([0-9]{1,6})(?:\.(.+))?")
"""Name in `.work`: run key, repetition, and what follows: `notes`, `leases`, `resume` or a
process."""
SHARD_NOTE = re.compile(r"part-([0-9]{5,9})\.json")


def shard_name(index: int, sha256: str) -> str:
    """Return the file name of shard `index`. The same name always has the same bytes."""
    return f"part-{index:05d}-{sha256[:8]}.arrow"


def note_name(index: int) -> str:
    """Return the name of the note that makes shard `index` count."""
    return f"part-{index:05d}.json"


def read_note(storage: Storage, key: str) -> dict[str, Any] | None:
    """Read a note. Returns None if it is missing or damaged."""
    try:
        fields = read_checked(storage, key)
        name = key.rpartition("/")[2]
        form = _ReportNote if name.endswith(".report") else _FORMS.get(name, FileEntry)
        form.model_validate(fields)
        return fields
    except (FileNotFoundError, CorruptError, ValueError, KeyError, AttributeError, TypeError):
        return None


class _Note(BaseModel):
    model_config = ConfigDict(strict=True)


class _CutNote(_Note):
    """The number of rows per shard."""

    rows_per_shard: int = Field(gt=0, lt=2**63)


class _SourcesNote(_Note):
    """References of the versions that the stage reads."""

    refs: list[str]


class _ReportNote(_Note):
    """A process's report on its share of the work, beside the fields that its stage adds."""

    shards: int = Field(ge=0)
    slowest: float
    seconds: dict[str, float]
    usage: dict[str, float]
    tokens: int = Field(0, ge=0)
    engine: dict[str, Any] = {}
    scorers: dict[str, float] = {}


class _ProgressNote(_Note):
    """The file from which an interrupted stage resumes."""

    file: str = Field(pattern=r"^[a-z][a-z0-9.-]*$", max_length=100)
    sha256: str


_FORMS = {"cut": _CutNote, SOURCES: _SourcesNote, PROGRESS: _ProgressNote}
"""Models that notes must satisfy, by name; those of shards are a manifest's entries."""


def damaged_notes(storage: Storage, run: str, kind: str) -> list[CorruptError]:
    """Return errors for damaged notes of unfinished work, and for files that differ from their
    note."""
    errors = []
    place = f"{run}/{kind}/.work"
    for folder in storage.list(place):
        match = WORK.fullmatch(folder)
        is_notes = match is not None and match[3] in ("notes", "resume")
        for name in storage.list(f"{place}/{folder}") if is_notes else ():
            is_ours = name in ("cut", SOURCES, PROGRESS) or name.endswith(".report")
            is_ours = is_ours or SHARD_NOTE.fullmatch(name)
            if is_ours and _is_damaged(storage, f"{place}/{folder}", name):
                errors.append(
                    CorruptError(
                        f"{run}/{kind} unfinished {name}",
                        "is not what was written",
                        state="no version is touched by this.",
                        next="run the stage again: it throws this away and does it again",
                    )
                )
    return errors


def _is_damaged(storage: Storage, prefix: str, name: str) -> bool:
    """Return True if a note, or the shard or state that it describes, is damaged."""
    note = read_note(storage, f"{prefix}/{name}")
    if note is None or "sha256" not in note:
        return note is None
    shards = prefix.removesuffix(".notes").replace("/.work/", f"/{storage.data_folder}/")
    file = f"{prefix}/{note['file']}" if "file" in note else f"{shards}/{note['name']}"
    try:
        return size_and_sha256(storage, file)[1] != note["sha256"]
    except FileNotFoundError:
        return False  # it is being published, or it is made again
    except CorruptError:
        return True
