"""The index of one kind in one run: what is asked of all its versions, in one file.

    STORE/<run>/<kind>/.index/versions    one JSON line a version; the last says of which state

        ["whole", 1, "4be1c0…", "reward", 512, 40960, "2026-…", "", [1767225600000000000, 77]]
        {"folder": […], "count": 1, "crc32": …}

The manifests are the truth. The index is trusted only while the kind's folder has the times and the
number of versions that its last line notes, and the lines before have their checksum; otherwise it
is made anew from them, and from the ledger's copies where the files of a version expired. So it may
be lost, torn, or put back from a copy, and finding a run_key opens one file however many versions
there are, or were.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import Any

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest, from_json
from quiver.schemas.plain import read_json
from quiver.schemas.refs import Ref

from .ledger import Ledger
from .storage import Storage

_MOST_BYTES = 612 * 1024 * 1024
"""A line a version, of some hundred bytes."""
_MOST_OF_STATE = 1000
"""Bytes of the last line."""
_TYPES = [str, int, str, str, int, int, str, str, list]
"""Of what a line holds."""
_TORN = b'["torn"'
"""How the line of a torn version begins."""
_VERSION_NAME = re.compile(r"^v([0-9]{6,12})$", re.MULTILINE)
_SECOND = 1_000_000_000
_TICK, _COARSE_TICK = _SECOND // 10, 2 * _SECOND
"""Nanoseconds. Two changes of a folder may bear one time where they come closer than its clock
ticks; the clock of some file systems counts whole seconds."""


@dataclass(frozen=True)
class IndexEntry:
    """One version, told without opening it."""

    state: str
    """whole; torn, where its manifest cannot be read; expired, where the ledger has it alone."""
    number: int
    run_key: str = ""
    stage: str = ""
    rows: int = 0
    bytes: int = 0
    created: str = ""
    error: str = ""
    """Why its manifest cannot be read."""
    stamp: tuple[int, ...] = ()
    """The manifest's, when it was read."""

    @classmethod
    def of(cls, manifest: Manifest, stamp: tuple[int, ...]) -> IndexEntry:
        """What the index tells of a version with this manifest."""
        return cls(
            state="whole",
            number=manifest.version,
            run_key=manifest.run_key,
            stage=manifest.stage,
            rows=manifest.rows,
            bytes=sum(manifest.bytes.values()),
            created=manifest.created,
            stamp=stamp,
        )


class Index:
    """The versions of one kind in one run."""

    def __init__(self, storage: Storage, run: str, kind: str) -> None:
        self._storage = storage
        self._run = run
        self._kind = kind
        self._folder = f"{run}/{kind}"
        # A folder of its own: what is written into it leaves the kind's modification time alone.
        self._key = f"{self._folder}/.index/versions"
        self._ledger = Ledger(storage, run, kind)

    def numbers(self) -> list[int]:
        """Version numbers, rising."""
        names = "\n".join(self._storage.list(self._folder))
        found = _VERSION_NAME.findall(names)
        return sorted(int(digits) for digits in found if len(digits) == 6 or digits[0] != "0")

    def entries(self) -> list[IndexEntry]:
        """Every version, rising; a manifest that has changed since it was noted is read again."""
        return [
            entry if entry.stamp == self._stamp(entry.number) else self._read(entry.number)
            for entry in self._entries()
            if entry.state != "expired"
        ]

    def expired(self) -> list[int]:
        """Numbers of the versions whose files expired, rising."""
        return [entry.number for entry in self._entries() if entry.state == "expired"]

    def find(self, run_key: str, *, expired: bool = False) -> list[int]:
        """Numbers of the versions that bear this run_key, rising, as far as the index knows; first,
        where they are asked for, those whose files expired."""
        entries = [
            self._read(entry.number) if entry.error else entry
            for entry in self._entries(run_key.encode())
        ]
        alike = [entry for entry in entries if entry.run_key == run_key]
        gone = [entry.number for entry in alike if expired and entry.state == "expired"]
        return gone + [entry.number for entry in alike if entry.state != "expired"]

    def _entries(self, text: bytes = b"") -> list[IndexEntry]:
        """Those of the lines that hold `text`, and the torn ones."""
        lines = self._lines()
        while text in lines or _TORN in lines:
            try:
                return [
                    _parse(line) for line in lines.splitlines() if text in line or _TORN in line
                ]
            except ValueError:  # whoever wrote these lines, it was not this program
                lines = self._make_anew()
        return []

    def add(self, manifest: Manifest) -> None:
        """Note a version that was just published, if its number is above all others.

        Otherwise, and where others published meanwhile, nothing is noted: whoever asks next makes
        the index anew.
        """
        state = self._state()
        lines, noted = self._noted()
        last_line = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        with suppress(ValueError):
            is_highest = not last_line or _parse(last_line).number < manifest.version
            if is_highest and noted.get("count") == state["count"] - 1:
                entry = IndexEntry.of(manifest, self._stamp(manifest.version))
                self._write(lines + _line(astuple(entry)), state)

    def _lines(self) -> bytes:
        """One line a version, from the index or from the manifests."""
        lines, noted = self._noted()
        return lines if self._is_trusted(noted) else self._make_anew(lines)

    def _make_anew(self, old_lines: bytes = b"") -> bytes:
        """The lines, from the manifests that `old_lines` do not tell of already."""
        numbers = self.numbers()
        noted_entries = {}
        with suppress(ValueError):
            noted_entries = {entry.number: entry for entry in map(_parse, old_lines.splitlines())}
        entries = []
        for number in numbers:
            entry = noted_entries.get(number)
            is_current = entry and entry.stamp and entry.stamp == self._stamp(number)
            entries.append(entry if is_current and not entry.error else self._read(number))
        for number, folder in self._ledger.tombstones():
            if not folder and number not in numbers:
                entries += self._expired(number, noted_entries.get(number))
        entries.sort(key=lambda entry: entry.number)
        lines = b"".join(_line(astuple(entry)) for entry in entries)
        if entries:
            # a store that cannot be written is read without an index
            with suppress(OSError):
                self._ledger.note_missing(numbers)
                self._storage.make_prefix(f"{self._folder}/.index", durable=False)
                state = self._state()
                if state["count"] == len(numbers):
                    self._write(lines, state)
        return lines

    def _state(self, count: int | None = None) -> dict[str, Any]:
        """The folder as it is at this moment, with `count` versions. None: they are counted, after
        the look at its times, which then are too old where another publishes in between."""
        stamp = self._storage.stamp(self._folder) or (0,)
        if count is None:
            count = len(self.numbers())
        return {"folder": list(stamp), "count": count}

    def _noted(self) -> tuple[bytes, dict[str, Any]]:
        """The lines of the index, and the state of the folder that its last line notes. Nothing,
        where there is no index, or one whose lines are not those that were written."""
        with suppress(OSError, ValueError):
            raw = self._storage.read(self._key, _MOST_BYTES)
            last_line = raw.rfind(b"\n", 0, -1) + 1
            lines, noted = raw[:last_line], read_json(raw[last_line : last_line + _MOST_OF_STATE])
            is_whole = isinstance(noted, dict) and noted.pop("crc32", None) == zlib.crc32(lines)
            if is_whole:
                return lines, noted
        return b"", {}

    def _is_trusted(self, noted: dict[str, Any]) -> bool:
        """Whether the folder is still in the state that was noted."""
        state = self._state(noted.get("count", -1))
        modified = state["folder"][0]
        tick = _TICK if modified % _SECOND else _COARSE_TICK
        if time.time_ns() - modified <= tick:
            state["count"] = len(self.numbers())
        return noted == state

    def _stamp(self, number: int) -> tuple[int, ...]:
        ref = Ref(self._run, self._kind, number)
        return self._storage.stamp(f"{ref.folder}/manifest.json") or ()

    def _expired(self, number: int, noted: IndexEntry | None) -> list[IndexEntry]:
        """A version that is gone, where its manifest still answers."""
        stamp = self._ledger.tombstone_stamp(number)
        if noted is None or noted.stamp != stamp:
            try:
                tombstone = self._ledger.tombstone(number)
            except CorruptError:
                return []  # `verify` tells of it
            manifest = self._ledger.manifest(number)
            if tombstone is None or not tombstone.expired or manifest is None:
                return []
            noted = replace(IndexEntry.of(manifest, stamp), state="expired")
        return [noted]

    def _read(self, number: int) -> IndexEntry:
        """The version as its manifest has it now."""
        ref = Ref(self._run, self._kind, number)
        stamp = self._stamp(number)
        try:
            raw = self._storage.read(f"{ref.folder}/manifest.json")
            return IndexEntry.of(from_json(raw, str(ref)), stamp)
        except (FileNotFoundError, NotADirectoryError):
            error = CorruptError(f"{ref} manifest.json", "is missing")
        except CorruptError as caught:
            error = caught
        message = f"{error.code} {error.object}: {error.message}"
        return IndexEntry("torn", number, error=message, stamp=stamp)

    def _write(self, lines: bytes, state: dict[str, Any]) -> None:
        last_line = _line({**state, "crc32": zlib.crc32(lines)})
        self._storage.write(self._key, lines + last_line, durable=False)


def _line(fields: tuple | dict) -> bytes:
    return f"{json.dumps(fields)}\n".encode()


def _parse(line: bytes) -> IndexEntry:
    """The entry of a line. ValueError where it is not one."""
    fields = read_json(line)
    if not isinstance(fields, list) or list(map(type, fields)) != _TYPES:
        raise ValueError("no line of an index")
    *fields, stamp = fields
    return IndexEntry(*fields, stamp=tuple(stamp))
