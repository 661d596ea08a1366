"""A tag: one reference that moves, and the journal of why it moved, or why it stayed.

    STORE/<run>/tags/prod               arith/policy@3
    STORE/<run>/tags/.prod.journal      one JSON line an entry, oldest first

An entry is on disk before the tag moves, so every move has one. What a crash leaves in between, an
entry that the tag does not bear out, is not shown, and the next entry takes its place. `Store.tag`
writes here, under a lock; `Store.history` reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from quiver.schemas import refs
from quiver.schemas.errors import ConfigError, CorruptError, printable

from . import files


class Entry(BaseModel):
    """What became of a tag, once. It stayed where it was when `before` is `ref`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str
    """UTC, ISO 8601."""
    before: str | None
    """What it pointed at; None: there was no such tag."""
    ref: str
    """What it points at since."""
    why: str = ""
    key: str = ""
    """Names what was decided; no two entries bear the same one, unless it is empty."""
    about: dict[str, Any] = {}
    """What the decision was made on."""


def check_name(name: str) -> str:
    """`name` if it may be a tag; ConfigError otherwise."""
    refs.check_name(name, "tag")
    if name == "latest" or name.isdecimal():
        raise ConfigError(
            f"tag {name!r}", "latest and numbers are not tags", next="choose another tag"
        )
    return name


def read(folder: Path, name: str) -> str | None:
    """What tag `name` in `folder` points at, or None."""
    try:
        return (folder / name).read_text().strip()
    except FileNotFoundError:
        return None


def history(folder: Path, name: str) -> list[Entry]:
    """The tag's entries, oldest first. CorruptError."""
    try:
        lines = (folder / f".{name}.journal").read_bytes().splitlines()
        entries = [Entry.model_validate_json(line) for line in lines]
    except FileNotFoundError:
        return []
    except ValidationError as error:
        where = f"{folder.parent.name} tag {name}"
        what = f".{name}.journal can not be read: {printable(error.errors()[0]['msg'])}"
        raise CorruptError(
            where,
            what,
            state="the tag and all versions are intact.",
            next=f"restore tags/.{name}.journal, or delete it: the tag then starts a new one",
        ) from None
    held = read(folder, name)
    unfinished = bool(entries) and entries[-1].ref != held and entries[-1].before == held
    return entries[:-1] if unfinished else entries


def move(folder: Path, name: str, target: str, why: str, key: str, about: dict[str, Any]) -> None:
    """Point the tag at `target`, its entry first; nothing where it points there already and nothing
    is decided (no `key`)."""
    held, entries = read(folder, name), history(folder, name)
    if held == target and not key:
        return
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    entries.append(Entry(at=at, before=held, ref=target, why=why, key=key, about=about))
    lines = "".join(f"{entry.model_dump_json()}\n" for entry in entries)
    files.write_bytes(folder / f".{name}.journal", lines.encode())
    files.sync(folder)
    files.write_bytes(folder / name, f"{target}\n".encode())
    files.sync(folder)


def previous(entries: Iterable[Entry]) -> str | None:
    """What the tag pointed at before its present version, and would go back to; None where there is
    nothing.

    A version that the tag came back from does not count.

    >>> moves = [(None, "a"), ("a", "b"), ("b", "c"), ("c", "b")]
    >>> previous(Entry(at="", before=before, ref=ref) for before, ref in moves)
    'a'
    """
    line: list[str] = []
    for entry in entries:
        if not line and entry.before:
            line.append(entry.before)
        if entry.ref in line:
            del line[line.index(entry.ref) + 1 :]
        else:
            line.append(entry.ref)
    return line[-2] if len(line) > 1 else None
