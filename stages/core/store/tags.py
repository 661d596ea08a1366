"""Tags: a reference that can move, with the history of why it moved or stayed.

    STORE/<run>/tags/prod/000003.json     one entry, with its checksum

The entry with the highest number is the tag, and all entries are its history. Creating the next
entry is the move. An entry is created only if its number is free, so if two processes move a tag at
once, one gets the number and the other sees the decision of the first.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from quiver.schemas import refs
from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, printable

from .storage import Storage, list_numbers, read_checked, with_checksum


class Entry(BaseModel):
    """One decision about a tag. The tag stayed where it was if `before` equals `ref`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str
    """UTC, ISO 8601."""
    before: str | None
    """Reference it pointed at before; None if the tag did not exist."""
    ref: str
    """Reference it points at since."""
    content_hash: str = ""
    """Content hash of that version."""
    why: str = ""
    key: str = ""
    """Identifies the decision. No two entries have the same key, unless it is empty."""
    about: dict[str, Any] = {}
    """The data the decision was based on."""


class Tag:
    """One tag of one run."""

    def __init__(self, storage: Storage, run: str, name: str) -> None:
        self.name = name
        self._storage = storage
        self._run = run
        self._prefix = f"{run}/tags/{name}"

    def newest(self) -> Entry | None:
        """Return the newest entry, or None if there is no such tag. Raises CorruptError."""
        numbers = self._numbers()
        return self._entry(numbers[-1]) if numbers else None

    def history(self) -> list[Entry]:
        """Return the tag's entries, oldest first. Raises CorruptError."""
        return [self._entry(number) for number in self._numbers()]

    def move(
        self, target: str, content_hash: str, expected: str | None, why: str, key: str, about: dict
    ) -> Entry | None:
        """Point the tag at `target`, and return the new entry.

        Returns None and changes nothing if an entry has this `key` already, or if the tag points
        there and `key` is empty.

        Args:
            expected: the reference it must hold now; None if the tag must not exist yet. "*"
                accepts any, also entries that cannot be read.

        Raises:
            ConflictError: the tag does not hold `expected`.
            ConfigError: it holds a version of another kind.
        """
        while True:
            # take all from one look at the entries: one written meanwhile has the next number
            numbers = self._numbers()
            entries = []
            for number in numbers:
                try:
                    entries.append(self._entry(number))
                except CorruptError:
                    if expected != "*":
                        raise
            before = entries[-1].ref if entries else None
            is_decided = key and any(entry.key == key for entry in entries)
            if not is_decided and expected not in ("*", before):
                raise ConflictError(
                    f"tag {self._run}/{self.name}",
                    f"expected {expected}, found {before}",
                    next="look at what the tag points at now, then tag again",
                )
            if before and refs.parse(before).kind != refs.parse(target).kind:
                problem = f"holds {before}, a version of another kind"
                next = f"choose another name, or delete {self._prefix} in the store"
                raise ConfigError(f"tag {self._run}/{self.name}", problem, next=next)
            is_there = entries and (before, entries[-1].content_hash) == (target, content_hash)
            if is_decided or (is_there and not key):
                # another process may not have flushed it yet
                self._storage.flush(self._prefix)
                return None
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            entry = Entry(
                at=at,
                before=before,
                ref=target,
                content_hash=content_hash,
                why=why,
                key=key,
                about=about,
            )
            number = max(numbers, default=0) + 1
            fields = entry.model_dump(mode="json") | self._place(number)
            place = f"{self._prefix}/{number:06d}.json"
            # only one process can create the entry of this number
            if self._storage.put_if_absent(place, with_checksum(fields), flush_name=True):
                return entry

    def undo(self, entry: Entry) -> None:
        """Point the tag back at what it pointed at before `entry`, its newest one. If `entry` is
        its only one, it stays, and gc keeps the version."""
        earlier = self.history()[:-1]
        if earlier:
            before = earlier[-1]
            why = f"back from {entry.ref}, which expired"
            self.move(before.ref, before.content_hash, entry.ref, why, "", {})

    def _numbers(self) -> list[int]:
        return list_numbers(self._storage, self._prefix, ".json")

    def _place(self, number: int) -> dict[str, Any]:
        """Return the fields that bind an entry to its tag and number."""
        return {"tag": f"{self._run}/{self.name}", "number": number}

    def _entry(self, number: int) -> Entry:
        key = f"{self._prefix}/{number:06d}.json"
        try:
            fields = read_checked(self._storage, key)
            place = self._place(number)
            if {name: fields.pop(name) for name in place} != place:
                raise ValueError("it is another entry's")
            entry = Entry.model_validate(fields)
            for ref in filter(None, (entry.before, entry.ref)):
                if not isinstance(refs.parse(ref).version, int):
                    raise ValueError(f"{printable(ref)} names no version by its number")
            return entry
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            raise CorruptError(
                f"{self._run} tag {self.name}",
                f"entry {number} cannot be read: {printable(error)}",
                state="all versions are intact; nothing was changed.",
                next=f"restore {key} from a copy, or delete it and let the tag point at the "
                "version that is meant",
            ) from None


def is_name(name: str) -> bool:
    """Return True if `name` may be the name of a tag."""
    return bool(refs.NAME.fullmatch(name)) and name != "latest" and not name.isdecimal()


def check_name(name: str) -> str:
    """Return `name` if it may be the name of a tag. Raises ConfigError otherwise."""
    refs.check_name(name, "tag")
    if not is_name(name):
        raise ConfigError(
            f"tag {name!r}",
            "latest and numbers are not tags",
            next="choose another tag",
        )
    return name


def previous(entries: Iterable[Entry]) -> str | None:
    """Return the reference the tag would go back to, or None.

    That is the one before its present version. A version that the tag was moved back from does not
    count.

    >>> moves = [(None, "a"), ("a", "b"), ("b", "c"), ("c", "b")]
    >>> previous(Entry(at="", before=before, ref=ref) for before, ref in moves)
    'a'
    """
    # the versions that the tag would go back through, the present one last
    line: list[str] = []
    for entry in entries:
        if not line and entry.before:
            line.append(entry.before)
        if entry.ref in line:
            del line[line.index(entry.ref) + 1 :]
        else:
            line.append(entry.ref)
    return line[-2] if len(line) > 1 else None
