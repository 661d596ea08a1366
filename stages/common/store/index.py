"""The index of one kind in one run: what is asked of all its versions, in one file.

    STORE/<run>/<kind>/.index/versions    one JSON line a version; the last says of which state

The manifests are the truth. The index is trusted only while the kind's folder has the modification
time and the number of versions that its last line notes; otherwise it is made anew from them. So it
may be lost, torn, or left behind by an older Quiver, and finding a run_key opens one file however
many versions there are.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest, from_json
from quiver.schemas.refs import Ref

from .storage import Storage

_FORMAT = 1
_TORN = '"error": "E-'
_SETTLED_NANOSECONDS = 2_000_000_000
"""Two changes of a folder may bear one time where they come closer than its clock ticks."""


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
        return sorted(int(name[1:]) for name in self._version_names())

    def entries(self) -> list[IndexEntry]:
        """Every version, rising; a manifest that has changed since it was noted is read again."""
        entries = [_parse(line) for line in self._text().splitlines()]
        return [
            entry
            if entry.generation == self._generation(entry.number)
            else self._read(entry.number)
            for entry in entries
        ]

    def find(self, run_key: str) -> list[int]:
        """Numbers of the versions that bear this run_key, rising, as far as the index knows."""
        text = self._text()
        if run_key not in text and _TORN not in text:
            return []
        entries = [_parse(line) for line in text.splitlines() if run_key in line or _TORN in line]
        entries = [self._read(entry.number) if entry.error else entry for entry in entries]
        return [entry.number for entry in entries if entry.run_key == run_key]

    def is_current(self) -> bool:
        """Whether it says what the folder holds."""
        return self._trusted_text() is not None

    def add(self, manifest: Manifest) -> None:
        """Note a version that was just published; the index was current right before that.

        Where others published meanwhile nothing is noted: whoever asks next makes it anew.
        """
        state = self._state()
        noted = self._noted()
        if noted is None or noted[1].get("count", -1) + 1 != state["count"]:
            return
        entry = IndexEntry.of(manifest, self._generation(manifest.version))
        self._write(f"{noted[0]}{json.dumps(asdict(entry))}\n", state)

    def _text(self) -> str:
        """One line a version, from the index or from the manifests."""
        text = self._trusted_text()
        if text is not None:
            return text
        entries = [self._read(number) for number in self.numbers()]
        text = "".join(f"{json.dumps(asdict(entry))}\n" for entry in entries)
        if entries:
            # a store that can not be written is read without an index
            with suppress(OSError):
                self._storage.make_prefix(f"{self._folder}/.index")
                state = self._state()
                if state["count"] == len(entries):
                    self._write(text, state)
        return text

    def _version_names(self) -> list[str]:
        names = self._storage.list(self._folder)
        return [name for name in names if name[0] == "v" and len(name) > 6 and name[1:].isdecimal()]

    def _modified(self) -> int:
        generation = self._storage.generation(self._folder)
        return generation[0] if generation else 0

    def _state(self) -> dict[str, int]:
        modified = self._modified()
        return {"format": _FORMAT, "modified": modified, "count": len(self._version_names())}

    def _noted(self) -> tuple[str, dict[str, int]] | None:
        """The lines of the index, and the state of the folder that its last line notes."""
        try:
            text = self._storage.read(self._key).decode()
            start = text.rstrip("\n").rfind("\n") + 1
            return text[:start], json.loads(text[start:])
        except (FileNotFoundError, ValueError):
            return None

    def _trusted_text(self) -> str | None:
        """One line a version; None where there is no index, or one of another state."""
        noted = self._noted()
        if noted is None or not isinstance(noted[1], dict):
            return None
        modified = self._modified()
        is_settled = time.time_ns() - modified > _SETTLED_NANOSECONDS
        count = noted[1].get("count") if is_settled else len(self._version_names())
        state = {"format": _FORMAT, "modified": modified, "count": count}
        return noted[0] if noted[1] == state and noted[0].count("\n") == count else None

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

    def _write(self, text: str, state: dict[str, int]) -> None:
        raw = f"{text}{json.dumps(state)}\n".encode()
        self._storage.write(self._key, raw, durable=False)


def _parse(line: str) -> IndexEntry:
    fields = json.loads(line)
    return IndexEntry(**{**fields, "generation": tuple(fields["generation"])})
