"""The index of one kind in one run: what is asked of all its versions, in one file.

    STORE/<run>/<kind>/.index/versions    one JSON line a version, and a last one that says of which state

The manifests are the truth. The index is trusted only while the kind's folder has the modification
time and the number of versions that its last line notes; otherwise it is made anew from them. So it
may be lost, torn, or left behind by an older Quiver, and finding a run_key opens one file however
many versions there are.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest, from_json
from quiver.schemas.refs import Ref

from .storage import Storage

_FORMAT = 1
_TORN = '"error": "E-'
_VERSION_NAME = re.compile(r"v(\d{6,})")


@dataclass(frozen=True)
class IndexEntry:
    """One version, told without opening it. `error`: its manifest is torn, and why."""

    number: int
    run_key: str = ""
    stage: str = ""
    rows: int = 0
    bytes: int = 0
    created: str = ""
    error: str = ""
    generation: tuple[int, ...] = ()
    """The manifest's, when it was read."""

    @classmethod
    def of(cls, manifest: Manifest, generation: tuple[int, ...]) -> IndexEntry:
        """What the index tells of a version with this manifest."""
        return cls(
            generation=generation,
            number=manifest.version,
            run_key=manifest.run_key,
            stage=manifest.stage,
            rows=manifest.rows,
            bytes=sum(manifest.bytes.values()),
            created=manifest.created,
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

    def numbers(self) -> list[int]:
        """Version numbers, rising."""
        names = self._storage.list(self._folder)
        return sorted(int(match[1]) for match in map(_VERSION_NAME.fullmatch, names) if match)

    def entries(self) -> list[IndexEntry]:
        """Every version, rising; a manifest that has changed since it was noted is read again."""
        entries = [_parse(line) for line in self._lines()]
        return [
            entry
            if entry.generation == self._generation(entry.number)
            else self._read(entry.number)
            for entry in entries
        ]

    def find(self, run_key: str) -> list[int]:
        """Numbers of the versions that bear this run_key, rising, as far as the index knows."""
        entries = [_parse(line) for line in self._lines() if run_key in line or _TORN in line]
        entries = [self._read(entry.number) if entry.error else entry for entry in entries]
        return [entry.number for entry in entries if entry.run_key == run_key]

    def is_current(self) -> bool:
        """Whether it says what the folder holds."""
        return self._trusted_lines() is not None

    def add(self, manifest: Manifest) -> None:
        """Note a version that was just published; the index was current right before that.

        Where others published meanwhile nothing is noted: whoever asks next makes it anew.
        """
        state = self._state()
        try:
            *lines, last = self._storage.read(self._key).decode().splitlines()
            count_before = json.loads(last)["count"]
        except (FileNotFoundError, ValueError, KeyError):
            return
        if count_before + 1 == state["count"]:
            entry = IndexEntry.of(manifest, self._generation(manifest.version))
            self._write([*lines, json.dumps(asdict(entry))], state)

    def _lines(self) -> list[str]:
        """One line a version, from the index or from the manifests."""
        lines = self._trusted_lines()
        return self._make_anew() if lines is None else lines

    def _state(self) -> dict[str, int]:
        generation = self._storage.generation(self._folder)
        modified = generation[0] if generation else 0
        return {"format": _FORMAT, "modified": modified, "count": len(self.numbers())}

    def _trusted_lines(self) -> list[str] | None:
        """One line a version; None where there is no index, or one of another state."""
        try:
            *lines, last = self._storage.read(self._key).decode().splitlines()
            state = json.loads(last)
        except (FileNotFoundError, ValueError):
            return None
        return lines if state == self._state() and len(lines) == state["count"] else None

    def _make_anew(self) -> list[str]:
        entries = [self._read(number) for number in self.numbers()]
        lines = [json.dumps(asdict(entry)) for entry in entries]
        if entries:
            try:
                self._storage.make_prefix(f"{self._folder}/.index")
                state = self._state()
                if state["count"] == len(entries):
                    self._write(lines, state)
            except OSError:
                pass  # a store that can not be written is read without an index
        return lines

    def _generation(self, number: int) -> tuple[int, ...]:
        folder = Ref(self._run, self._kind, number).folder
        return self._storage.generation(f"{folder}/manifest.json") or ()

    def _read(self, number: int) -> IndexEntry:
        """The version as its manifest has it now."""
        ref = Ref(self._run, self._kind, number)
        generation = self._generation(number)
        try:
            raw = self._storage.read(f"{ref.folder}/manifest.json")
            return IndexEntry.of(from_json(raw, str(ref)), generation)
        except (FileNotFoundError, NotADirectoryError):
            error = CorruptError(f"{ref} manifest.json", "is missing")
        except CorruptError as caught:
            error = caught
        message = f"{error.code} {error.object}: {error.message}"
        return IndexEntry(number, error=message, generation=generation)

    def _write(self, lines: list[str], state: dict[str, int]) -> None:
        text = "".join(f"{line}\n" for line in [*lines, json.dumps(state)])
        self._storage.write(self._key, text.encode(), durable=False)


def _parse(line: str) -> IndexEntry:
    fields = json.loads(line)
    return IndexEntry(**{**fields, "generation": tuple(fields["generation"])})
