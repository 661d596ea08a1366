"""Tags: a reference that can move, with a journal of why it moved or stayed.

    STORE/<run>/tags/.prod/000003     one entry of the journal, with its checksum
    STORE/<run>/tags/prod             arith/policy@3, for people and for other programs
    STORE/<run>/tags/.prod/newest     3

Writing the entry is the move. It is created only if its number is free, so if two processes move a
tag at once, one gets the number and the other sees the decision of the first. The file `prod`
follows, then `newest`. If the newest entry is lost, `newest` prevents the one before from passing
for the newest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict

from quiver.schemas import refs
from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, printable
from quiver.schemas.manifest import digest
from quiver.schemas.plain import read_json

from .storage import Storage


class Entry(BaseModel):
    """One decision about a tag. The tag stayed where it was if `before` equals `ref`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: str
    """UTC, ISO 8601."""
    before: str | None
    """Reference it pointed at before; None if the tag did not exist."""
    ref: str
    """Reference it points at since."""
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
        self._folder = f"{run}/tags"

    def ref(self) -> str | None:
        """Return the reference of the tag's newest entry, or None if there is no such tag.

        The file may be missing, show the newest entry's reference, or show one of an earlier entry:
        a process may have died before it wrote the file. Raises CorruptError for any other file,
        and if the newest entry is gone or cannot be read.
        """
        newest = self._newest()
        numbers = self._numbers()
        if newest > max(numbers, default=0):
            self._entry(newest)  # raises, because the entry is gone
        while numbers:
            entry = self._entry(numbers[-1])
            shown = self._file()
            # processes that died, or are moving it right now, leave an earlier reference in the
            # file
            moves = map(self._entry, reversed(numbers))
            if shown is None or any(shown in (move.ref, move.before) for move in moves):
                return entry.ref
            if numbers == self._numbers():
                raise self._disagreement(entry.ref)
            numbers = self._numbers()  # it was moved meanwhile
        if self._file() is not None:
            raise self._disagreement(None)
        return None

    def history(self) -> list[Entry]:
        """Return the tag's entries, oldest first. Raises CorruptError."""
        self.ref()
        return [self._entry(number) for number in self._numbers()]

    def verify(self) -> None:
        """Raise CorruptError if an entry or the file cannot be read, or if they disagree."""
        self.history()

    def move(self, target: str, expected: str | None, why: str, key: str, about: dict) -> None:
        """Point the tag at `target`.

        Nothing changes if an entry has this `key` already, or if the tag points there and `key` is
        empty.

        Args:
            expected: the reference it must hold now; None if the tag must not exist yet. "*"
                accepts any state, also if file and journal disagree; only "*" settles that.

        Raises:
            ConflictError: the tag does not hold `expected`.
        """
        if expected != "*":
            self.ref()
        while True:
            # take all from one look at the journal: an entry written meanwhile has the next number
            numbers = self._numbers()
            moves = [self._entry(number) for number in numbers]
            before = moves[-1].ref if moves else self._file()
            is_decided = key and any(entry.key == key for entry in moves)
            if not is_decided and expected not in ("*", before):
                raise ConflictError(
                    f"tag {self._run}/{self.name}",
                    f"expected {expected}, found {before}",
                    next="look at what the tag points at now, then tag again",
                )
            if is_decided or (numbers and before == target and not key):
                self._write_file()
                return
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            entry = Entry(at=at, before=before, ref=target, why=why, key=key, about=about)
            # only one process can create the entry of this number
            number = max(numbers, default=0) + 1
            fields = entry.model_dump(mode="json") | self._place(number)
            line = json.dumps({**fields, "checksum": digest(fields)})
            prefix = f"{self._folder}/.{self.name}"
            self._storage.make_prefix(prefix)
            if self._storage.put_if_absent(f"{prefix}/{number:06d}", line.encode()):
                self._write_file()
                return

    def _write_file(self) -> None:
        """Make the files match the journal, even if another process moves the tag meanwhile."""
        written = 0
        while written != (newest := max(self._numbers(), default=0)):
            written = newest
            held = self._entry(written).ref
            self._storage.write(f"{self._folder}/{self.name}", f"{held}\n".encode())
            self._storage.write(f"{self._folder}/.{self.name}/newest", f"{written}\n".encode())

    def _place(self, number: int) -> dict[str, Any]:
        """Return the fields that bind an entry to its tag and number."""
        return {"tag": f"{self._run}/{self.name}", "number": number}

    def _disagreement(self, held: str | None) -> CorruptError:
        return CorruptError(
            f"{self._run} tag {self.name}",
            f"the file says {self._file()}, its journal {held or 'is gone'}",
            state="all versions are intact; nothing was changed.",
            next=f"quiver tag {self.name} {held or self._file()}",
        )

    def _numbers(self) -> list[int]:
        return self._storage.list_numbers(f"{self._folder}/.{self.name}")

    def _newest(self) -> int:
        """Return the highest number that was noted, or 0 if none was. Raises CorruptError."""
        if "newest" not in self._storage.list(f"{self._folder}/.{self.name}"):
            return 0
        key = f".{self.name}/newest"
        with self._reading(key):
            return int(self._storage.read(f"{self._folder}/{key}"))

    def _entry(self, number: int) -> Entry:
        key = f".{self.name}/{number:06d}"
        with self._reading(key):
            fields = read_json(self._storage.read(f"{self._folder}/{key}"))
            checksum = fields.pop("checksum")
            if checksum != digest(fields):
                raise ValueError(f"checksum expected {printable(checksum)}, found {digest(fields)}")
            place = self._place(number)
            if {key: fields.pop(key) for key in place} != place:
                raise ValueError("it is another entry's")
            return _checked(Entry.model_validate(fields))

    def _file(self) -> str | None:
        with self._reading(self.name, may_be_absent=True):
            text = self._storage.read(f"{self._folder}/{self.name}").decode().strip()
            _require_number(text)
            return text
        return None

    @contextmanager
    def _reading(self, key: str, *, may_be_absent: bool = False) -> Iterator[None]:
        """Turn an error from reading `key` into CorruptError.

        With `may_be_absent`, a missing file is not an error.
        """
        try:
            yield
        except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
            if may_be_absent and isinstance(error, FileNotFoundError):
                return
            raise CorruptError(
                f"{self._run} tag {self.name}",
                f"{key} cannot be read: {printable(error)}",
                state="all versions are intact; nothing was changed.",
                next=f"restore tags/{key} from a copy, or delete it and let the tag point at the "
                "version that is meant",
            ) from None


def _checked(entry: Entry) -> Entry:
    """Return `entry` if its references have numbers. Raises ValueError."""
    for ref in filter(None, (entry.before, entry.ref)):
        _require_number(ref)
    return entry


def _require_number(ref: str) -> None:
    if not isinstance(refs.parse(ref).version, int):
        raise ValueError(f"{printable(ref)} names no version by its number")


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
    line: list[str] = []
    for entry in entries:
        if not line and entry.before:
            line.append(entry.before)
        if entry.ref in line:
            del line[line.index(entry.ref) + 1 :]
        else:
            line.append(entry.ref)
    return line[-2] if len(line) > 1 else None
