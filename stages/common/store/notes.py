"""Notes beside what is staged: which shards are finished, how rows are cut into shards, what a
stage reads, how far it is, and what each process says of its part.

A note carries a checksum, since what is not hashed decides nothing: one that is not whole is passed
over, and what it was about is done again.

Not of the spine: the writer needs to know only that a note is whole or not there.
"""

from __future__ import annotations

import json
import re
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import FileEntry, digest
from quiver.schemas.plain import read_json

from .storage import Storage

PROGRESS = "progress"
"""The note, beside what a stage goes on from, that makes it count."""
SOURCES = "sources"
"""The note that names what the stage reads."""
KEPT_SUFFIXES = (".notes", ".leases", ".resume")
"""Of what lies beside the staged files and is no candidate."""
SHARD_NOTE = re.compile(r"part-([0-9]{5,9})\.arrow\.json")


def shard_name(index: int) -> str:
    """The file that shard `index` is staged as."""
    return f"part-{index:05d}.arrow"


def note_of(fields: dict[str, Any]) -> bytes:
    """A note in the staging place, with a checksum: what is not hashed decides nothing."""
    return json.dumps({**fields, "checksum": digest(fields)}).encode()


def read_note(storage: Storage, key: str) -> dict[str, Any] | None:
    """What a note says; None where there is none, or one that is not whole."""
    try:
        fields = read_json(storage.read(key))
        checksum = fields.pop("checksum")
        if checksum != digest(fields):
            return None
        _form_of(key).model_validate(fields)
    except (FileNotFoundError, CorruptError):
        return None
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return fields


def make_folder(storage: Storage, prefix: str) -> None:
    """A folder to stage in, also where a file has its name; among notes no folder stays."""
    if not storage.path(prefix).is_dir():
        storage.delete(prefix)
    storage.make_prefix(prefix)
    if prefix.endswith(".notes"):
        for entry in storage.path(prefix).iterdir():
            if entry.is_dir():
                storage.delete_tree(f"{prefix}/{entry.name}")


class _Note(BaseModel):
    model_config = ConfigDict(strict=True)


class _PlanNote(_Note):
    """How the rows are cut into shards."""

    rows_per_shard: int = Field(gt=0, lt=2**63)


class _SourcesNote(_Note):
    """What the stage reads."""

    refs: list[str]


class _ReportNote(_Note):
    """What a process says of its part, beside what its stage notes as it likes."""

    shards: int = Field(ge=0)
    slowest: float
    seconds: dict[str, float]
    tokens: int = Field(0, ge=0)
    engine: dict[str, Any] = {}
    scorers: dict[str, float] = {}


class _ProgressNote(_Note):
    """Where a stage goes on in the middle: the file that holds its state."""

    file: str = Field(pattern=r"^[a-z][a-z0-9.-]*$", max_length=100)
    sha256: str


def _form_of(key: str) -> type[BaseModel]:
    """What a note of this name holds."""
    name = key.rpartition("/")[2]
    if name.endswith(".report"):
        return _ReportNote
    forms = {"plan": _PlanNote, SOURCES: _SourcesNote, PROGRESS: _ProgressNote}
    return forms.get(name, FileEntry)


def damaged_staging(storage: Storage, run: str, kind: str) -> list[CorruptError]:
    """What is staged of one kind and is not what was written: notes, and files that have one."""
    errors = []
    staging = f"{run}/{kind}/.staging"
    for folder in storage.list(staging):
        run_key, _, suffix = folder.partition(".")
        names = storage.list(f"{staging}/{folder}") if suffix in ("notes", "resume") else []
        for name in names:
            is_ours = name in ("plan", SOURCES, PROGRESS) or name.endswith(".report")
            is_ours = is_ours or SHARD_NOTE.fullmatch(name)
            if is_ours and _is_damaged(storage, f"{staging}/{run_key}", suffix, name):
                errors.append(
                    CorruptError(
                        f"{run}/{kind} staged {name}",
                        "is not what was written",
                        state="no version is touched by this.",
                        next="run the stage again: it throws this away and does it again",
                    )
                )
    return errors


def _is_damaged(storage: Storage, prefix: str, suffix: str, name: str) -> bool:
    """Whether a note, or the shard or state that it is about, is not what was written."""
    key = f"{prefix}.{suffix}/{name}"
    note = read_note(storage, key)
    if note is None or "sha256" not in note:
        return note is None
    file = f"{prefix}.{suffix}/{note['file']}" if "file" in note else f"{prefix}/{note['name']}"
    try:
        return storage.sha256(file) != note["sha256"]
    except (FileNotFoundError, CorruptError):
        return True


def summed_seconds(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each phase summed over processes; of `total` the longest, which is that of the
    first to come."""
    names = dict.fromkeys(name for of_process in seconds for name in of_process)
    summed = {name: sum(of_process.get(name, 0.0) for of_process in seconds) for name in names}
    summed["total"] = max(of_process.get("total", 0.0) for of_process in seconds)
    return {name: round(value, 3) for name, value in summed.items()}
