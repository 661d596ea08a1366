"""The index of one kind in one run: a summary of all its versions in one file.

    STORE/<run>/<kind>/.index/versions    one JSON line per version; the last line is the
                                          state of the kind's folder

        ["whole", 1, "4be1c0…", "reward", 512, 40960, "2026-…", "", [1767225600000000000, 77]]
        {"folder": […], "count": 1, "crc32": …}

The manifests are the truth; the index is a cache. It is trusted only while the kind's folder has
the times and the number of versions in the last line, and the other lines match their checksum.
Otherwise it is rebuilt from the manifests, and from the ledger's copies for expired versions. So
the index may be lost, torn, or restored from an old copy. Finding a run key opens one file, however
many versions exist or existed.

Not of the spine: reading the manifests would give the same answers, only later.
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
"""Largest index that is read: one line of some hundred bytes per version."""
_MOST_OF_STATE = 1000
"""Largest size of the last line, in bytes."""
_TYPES = [str, int, str, str, int, int, str, str, list]
"""Types of the fields in a line."""
_TORN = b'["torn"'
"""Beginning of a torn version's line."""
_VERSION_NAME = re.compile(r"^v([0-9]{6,12})$", re.MULTILINE)
_SECOND = 1_000_000_000
_TICK, _COARSE_TICK = _SECOND // 10, 2 * _SECOND
"""Nanoseconds. Two changes of a folder closer than its clock's tick may bear the same time; some
file systems count whole seconds.
"""


@dataclass(frozen=True)
class IndexEntry:
    """A summary of one version, read without opening it."""

    state: str
    """State of the version: `whole`; `torn` if its manifest cannot be read; `expired` if only the
    ledger still has it. The state in the index's last line is the folder's instead."""
    number: int
    run_key: str = ""
    stage: str = ""
    rows: int = 0
    bytes: int = 0
    created: str = ""
    error: str = ""
    """Why its manifest cannot be read, or empty."""
    stamp: tuple[int, ...] = ()
    """Stamp of the manifest (or tombstone, if expired) when it was read."""

    @classmethod
    def of(cls, manifest: Manifest, stamp: tuple[int, ...]) -> IndexEntry:
        """Build the entry of a whole version with this manifest."""
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
        # a folder of its own, since writing into it must not change the modification time of the
        # kind's folder
        self._key = f"{self._folder}/.index/versions"
        self._ledger = Ledger(storage, run, kind)

    def numbers(self) -> list[int]:
        """Return the numbers of the visible versions, rising."""
        names = "\n".join(self._storage.list(self._folder))
        found = _VERSION_NAME.findall(names)
        return sorted(int(digits) for digits in found if len(digits) == 6 or digits[0] != "0")

    def entries(self) -> list[IndexEntry]:
        """Return every visible version, rising. Changed manifests are read again."""
        return [
            entry if entry.stamp == self._stamp(entry.number) else self._read(entry.number)
            for entry in self._entries()
            if entry.state != "expired"
        ]

    def expired(self) -> list[int]:
        """Return the numbers of the versions whose files expired, rising."""
        return [entry.number for entry in self._entries() if entry.state == "expired"]

    def numbers_with(self, run_key: str, *, expired: bool = False) -> list[int]:
        """Return the numbers of versions with this run key, rising.

        With `expired`, versions whose files expired are included, before all others.
        """
        entries = [
            self._read(entry.number) if entry.error else entry
            for entry in self._entries(run_key.encode())
        ]
        alike = [entry for entry in entries if entry.run_key == run_key]
        gone = [entry.number for entry in alike if expired and entry.state == "expired"]
        return gone + [entry.number for entry in alike if entry.state != "expired"]

    def _entries(self, text: bytes = b"") -> list[IndexEntry]:
        """Return the entries whose line contains `text`, and the torn ones."""
        lines = self._lines()
        # searching the whole text is cheap, and often nothing has to be parsed; lines that were
        # made anew can be parsed, so the loop ends
        while text in lines or _TORN in lines:
            try:
                return [
                    _parse(line) for line in lines.splitlines() if text in line or _TORN in line
                ]
            except ValueError:  # this program did not write these lines
                lines = self._make_anew()
        return []

    def add(self, manifest: Manifest) -> None:
        """Note a version that was just published, if its number is above all others.

        Otherwise, or if another process published meanwhile, nothing is written and the next reader
        rebuilds the index.
        """
        state = self._state()
        lines, noted = self._noted()
        last_line = lines[lines.rfind(b"\n", 0, -1) + 1 :]
        with suppress(ValueError):
            is_highest = not last_line or _parse(last_line).number < manifest.version
            # the index must know all versions but the new one; otherwise other versions were
            # published or deleted meanwhile
            if is_highest and noted.get("count") == state["count"] - 1:
                entry = IndexEntry.of(manifest, self._stamp(manifest.version))
                self._write(lines + _line(astuple(entry)), state)

    def _lines(self) -> bytes:
        """Return one line per version, from the index if trusted, else from the manifests."""
        lines, noted = self._noted()
        return lines if self._is_trusted(noted) else self._make_anew(lines)

    def _make_anew(self, old_lines: bytes = b"") -> bytes:
        """Rebuild the lines, reading only the manifests that changed since `old_lines`."""
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
            # without write permission, the store is read without an index
            with suppress(OSError):
                self._ledger.note_missing(numbers)
                self._storage.make_prefix(f"{self._folder}/.index", durable=False)
                state = self._state()
                # otherwise a version was published or deleted meanwhile
                if state["count"] == len(numbers):
                    self._write(lines, state)
        return lines

    def _state(self, count: int | None = None) -> dict[str, Any]:
        """Return the folder's state now: its stamp and the number of versions.

        Without `count`, the versions are counted after the stamp is read. So if a version is
        published in between, the stamp is too old and the index is not trusted.
        """
        stamp = self._storage.stamp(self._folder) or (0,)
        if count is None:
            count = len(self.numbers())
        return {"folder": list(stamp), "count": count}

    def _noted(self) -> tuple[bytes, dict[str, Any]]:
        """Return the index lines and the folder state in the last line.

        Both are empty if the index is missing or does not match its checksum.
        """
        with suppress(OSError, ValueError):
            raw = self._storage.read(self._key, _MOST_BYTES)
            last_line = raw.rfind(b"\n", 0, -1) + 1
            lines, noted = raw[:last_line], read_json(raw[last_line : last_line + _MOST_OF_STATE])
            is_whole = isinstance(noted, dict) and noted.pop("crc32", None) == zlib.crc32(lines)
            if is_whole:
                return lines, noted
        return b"", {}

    def _is_trusted(self, noted: dict[str, Any]) -> bool:
        """Return True if the folder is still in the noted state."""
        # with the noted count the stamp alone decides, since counting lists the whole folder
        state = self._state(noted.get("count", -1))
        modified = state["folder"][0]
        tick = _TICK if modified % _SECOND else _COARSE_TICK
        # within one tick, a later change could bear the same time, so the versions are counted
        if time.time_ns() - modified <= tick:
            state["count"] = len(self.numbers())
        return noted == state

    def _stamp(self, number: int) -> tuple[int, ...]:
        ref = Ref(self._run, self._kind, number)
        return self._storage.stamp(f"{ref.folder}/manifest.json") or ()

    def _expired(self, number: int, noted: IndexEntry | None) -> list[IndexEntry]:
        """Return the entry of an expired version, or none if its manifest is unknown."""
        stamp = self._ledger.tombstone_stamp(number)
        if noted is None or noted.stamp != stamp:
            try:
                tombstone = self._ledger.tombstone(number)
            except CorruptError:
                return []  # `verify` reports it
            manifest = self._ledger.manifest(number)
            if tombstone is None or not tombstone.expired or manifest is None:
                return []
            noted = replace(IndexEntry.of(manifest, stamp), state="expired")
        return [noted]

    def _read(self, number: int) -> IndexEntry:
        """Build the entry of a version from its manifest now."""
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
    """Parse one line. Raises ValueError if it is not an index entry."""
    fields = read_json(line)
    if not isinstance(fields, list) or list(map(type, fields)) != _TYPES:
        raise ValueError("no line of an index")
    *fields, stamp = fields
    return IndexEntry(*fields, stamp=tuple(stamp))
