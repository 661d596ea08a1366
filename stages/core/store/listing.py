"""Numbers and marks of one kind in one run, and a summary of each manifest.

    STORE/<run>/<kind>/v000003/                    a version
    STORE/<run>/<kind>/v000003.expired             marks (see `marks`)
    STORE/<run>/<kind>/v000003.expired.optimizer
    STORE/<run>/<kind>/v000003.removed
    STORE/<run>/<kind>/.index                      a line for each manifest that was read

One listing of the folder gives all numbers and all marks. Manifests never change, so a line of the
index stays true unless the manifest is damaged, which `verify` tells. Manifests that have no
line are read, so the index may be lost, torn or old. A torn manifest gets no line.

Not of the spine: a version is found by its run key, and this file says how that stays quick.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import from_json
from quiver.schemas.refs import Ref, as_version
from quiver.stages.core.threads import map_in_threads

from .storage import Storage

log = logging.getLogger(__name__)
EXPIRED, NO_OPTIMIZER, REMOVED = "expired", "expired.optimizer", "removed"
"""Names of marks: all data of a version, a policy's optimizer state alone; removed by a user."""
_MOST_BYTES = 612 * 1024 * 1024
"""Largest index that is read: one line of about 300 bytes per version."""
_LINES_FORMAT = 4
"""Format of the lines. The checksum starts from it, so an index of another format counts as torn.
"""
_NAME = re.compile(rf"^v([0-9]{{6,12}})(?:\.({EXPIRED}|{NO_OPTIMIZER}|{REMOVED}))?$", re.MULTILINE)
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})",')
"""The checksum in a manifest; the keys are sorted, so no other text comes before it."""


_OF_SWEEP = re.compile(r"^sweep [0-9a-f]{12}(,|$)")
"""Beginning of the note of what `quiver sweep` made: the sweep's name."""
_NO_MANIFEST = (ValueError, KeyError, TypeError, AttributeError)
_Word = Annotated[str, Field(pattern=r"^\S+$")]
_Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def is_of_sweep(note: str) -> bool:
    """Return whether a version with this note was made by a sweep: it is a sibling of its run's
    iterations, and no later one."""
    return _OF_SWEEP.match(note) is not None


@dataclass(frozen=True)
class Summary:
    """The fields of a manifest that listings show."""

    number: int
    run_key: _Hash = ""
    content_hash: _Hash = ""
    stage: _Word = ""
    rows: int = 0
    bytes: int = 0
    created: _Word = ""
    error: str = ""
    """Why the manifest cannot be read, or empty."""
    note: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Roles of the versions that it was made of, models too, by reference."""

    def source(self, role: str) -> str | None:
        """Return the reference of a version that it was made of, by its role; None if there is
        none."""
        return next((ref for ref, its_role in self.sources.items() if its_role == role), None)

    @property
    def trained_from(self) -> str | None:
        """The policy that this one was trained from. None: a base, or an average of others."""
        return None if self.stage == "average" else self.source("policy")

    @classmethod
    def of(cls, fields: Mapping[str, Any], number: int) -> Summary:
        """Build the summary of a manifest from its fields, as plain JSON.

        Raises ValueError, KeyError, TypeError or AttributeError if they are not the manifest of
        the version with this number, or if its stage or date is not one word.
        """
        if fields["version"] != number:
            raise ValueError("it is another version's")
        own = f"{fields['run']}/{fields['kind']}@{number}"
        words = ("run_key", "content_hash", "stage", "rows", "created")
        entries = (*fields["models"], *fields["inputs"])
        sources = {one["ref"]: one["role"] for one in entries if as_version(one["ref"])}
        sources.pop(own, None)
        return _SUMMARY.validate_python(
            {
                **{name: fields[name] for name in words},
                "number": number,
                "bytes": sum(fields["bytes"].values()),
                "note": fields.get("note", ""),
                "sources": sources,
            }
        )

    def line(self) -> bytes:
        """Return its line in the index: number, run key and content hash, to search for, and the
        rest as JSON."""
        words = f"{self.number} {self.run_key} {self.content_hash} ".encode()
        return words + _SUMMARY.dump_json(self, exclude={"number", "run_key", "content_hash"})


_SUMMARY = TypeAdapter(Summary)


class Listing:
    """The versions of one kind in one run at one moment."""

    def __init__(self, storage: Storage, run: str, kind: str) -> None:
        self._storage = storage
        self._run = run
        self._kind = kind
        self._folder = f"{run}/{kind}"
        self._key = f"{self._folder}/.index"
        numbers_of = _numbers_of("\n".join(storage.list(self._folder)))
        self.numbers: list[int] = sorted(numbers_of[""])
        """Numbers of all versions, marked ones too, rising."""
        self.marks = {name: numbers_of[name] for name in (EXPIRED, NO_OPTIMIZER, REMOVED)}
        """Numbers with each mark."""
        self.given: set[int] = set().union(*numbers_of.values())
        """All numbers that cannot be given again: of versions, and of marks alone."""

    def visible(self, *, expired: bool) -> list[int]:
        """Return the numbers of the versions that were not removed, and did not expire either
        unless `expired`, oldest first.

        A version that was made again with the same content, because the data of an earlier one were
        gone, has the place of the earlier one: it is not newer than what was made since.
        """
        hidden = self.marks[REMOVED] | (set() if expired else self.marks[EXPIRED])
        numbers = [number for number in self.numbers if number not in hidden]
        gone = sorted(self.marks[REMOVED] | self.marks[EXPIRED], reverse=True)
        if not gone or not numbers:
            return numbers
        lines, _ = self._lines
        # run key and content; a torn one has neither, so it has its own place
        identities = {number: (*line.split(b" ", 3)[1:3],) for number, line in lines.items()}
        first_of = {identities.get(number, number): number for number in gone}

        def place(number: int) -> tuple[int, int]:
            return min(first_of.get(identities.get(number, number), number), number), number

        return sorted(numbers, key=place)

    def newest_not_of_sweep(self, numbers: Sequence[int]) -> int:
        """Return the last of `numbers` that no sweep made; if a sweep made all, the last."""
        lines, _ = self._lines
        for number in reversed(numbers):
            # a torn one has no line, and is not passed over
            if number not in lines or not is_of_sweep(_parsed(lines[number]).note):
                return number
        return numbers[-1]

    def summaries(self) -> list[Summary]:
        """Return the summary of every version, rising."""
        lines, torn = self._lines
        return sorted([*map(_parsed, lines.values()), *torn], key=lambda summary: summary.number)

    def find(self, run_key: str) -> list[int]:
        """Return the numbers of all versions with this run key, rising."""
        lines, torn = self._lines
        for summary in torn:
            log.warning("%s is passed over: %s", self._folder, summary.error)
        key = f" {run_key} ".encode()
        return sorted(number for number, line in lines.items() if key in line)

    @cached_property
    def _lines(self) -> tuple[Mapping[int, bytes], list[Summary]]:
        """Return a line for each manifest that can be read, by number, and the torn ones."""
        index = b""
        with suppress(OSError, CorruptError):
            index = self._storage.read(self._key, _MOST_BYTES)
        lines = _lines_of(index)
        summaries = map_in_threads(self.read, sorted(set(self.numbers) - lines.keys()))
        torn = [summary for summary in summaries if summary.error]
        if len(torn) < len(summaries) or not lines.keys() <= set(self.numbers):
            lines = {number: lines[number] for number in self.numbers if number in lines}
            lines |= {one.number: one.line() for one in summaries if not one.error}
            # their process may have died before its own flush
            self._storage.flush(self._folder)
            text = b"".join(b"%s\n" % lines[number] for number in sorted(lines))
            # without write permission, the store is read without an index
            with suppress(OSError, CorruptError):
                index = b"%s\n%s" % (checksum_of(text), text)
                self._storage.put(self._key, index, durable=False)
        return lines, torn

    def read(self, number: int) -> Summary:
        """Build the summary of a version from its manifest."""
        ref = Ref(self._run, self._kind, number)
        try:
            raw = self._storage.read(f"{ref.folder}/manifest.json")
            with suppress(*_NO_MANIFEST):
                return Summary.of(manifest_fields(raw) or {}, number)
            manifest = from_json(raw, str(ref))
            with suppress(*_NO_MANIFEST):
                return Summary.of(manifest.model_dump(mode="json", by_alias=True), number)
            problem = f"its number is {manifest.version}, or its stage or date not one word"
            error = CorruptError(f"{ref} manifest.json", problem)
        except (FileNotFoundError, NotADirectoryError):
            error = CorruptError(f"{ref} manifest.json", "is missing")
        except CorruptError as caught:
            error = caught
        return Summary(number, error=f"{error.code} {error.object}: {error.message}")


def read_fields(storage: Storage, ref: Ref) -> dict[str, Any] | None:
    """Read the fields of a version's manifest; None if it is damaged or missing."""
    with suppress(OSError, CorruptError):
        return manifest_fields(storage.read(f"{ref.folder}/manifest.json"))
    return None


def manifest_fields(raw: bytes) -> dict[str, Any] | None:
    """Read the fields of a whole manifest without building it; None if that does not work.

    `from_json` takes a millisecond, too long for ten thousand manifests.
    """
    match = _CHECKSUM.search(raw)
    if match is None:
        return None
    if hashlib.sha256(raw[: match.start()] + raw[match.end() :]).hexdigest().encode() != match[1]:
        return None
    with suppress(ValueError, RecursionError):
        return json.loads(raw)
    return None


@lru_cache(maxsize=8)
def _numbers_of(names: str) -> Mapping[str, set[int]]:
    """Return the numbers of versions, under "", and with each mark, from the names in a folder."""
    numbers_of: dict[str, set[int]] = defaultdict(set)
    for digits, mark in _NAME.findall(names):
        if len(digits) == 6 or digits[0] != "0":
            numbers_of[mark].add(int(digits))
    return numbers_of


def checksum_of(lines: bytes) -> bytes:
    """Return the first line of an index with these lines."""
    return b"%08x" % zlib.crc32(lines, _LINES_FORMAT)


@lru_cache(maxsize=8)
def _lines_of(index: bytes) -> Mapping[int, bytes]:
    """Return the lines of an index by number; none if it is torn."""
    checksum, _, lines = index.partition(b"\n")
    if checksum != checksum_of(lines):
        return {}
    with suppress(ValueError):
        return {int(line.partition(b" ")[0]): line for line in lines.splitlines()}
    return {}


def _parsed(line: bytes) -> Summary:
    number, run_key, content_hash, rest = line.split(b" ", 3)
    return Summary(int(number), run_key.decode(), content_hash.decode(), **json.loads(rest))
