"""The ledger of one kind in one run: every number that was ever given, also to what is gone since.

    STORE/<run>/<kind>/.ledger/v000003.4be1c0…    its manifest; the name ends in its content hash
    STORE/<run>/<kind>/.ledger/v000003.expired    it was deleted on purpose: when and why

A number is never given to other content. The folder of a version may be deleted, by `quiver rm` or
by hand; a copy of its manifest stays here, and the number comes back only with the very same
content, so that what was made of it is whole again.

Only names are read to choose a number, so that costs two listings however many versions there are.
A process that dies between publishing a version and noting it leaves that to whoever comes next.

Not of the spine: its readers need to know only that a number is never given twice.
"""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest, digest, from_json
from quiver.schemas.refs import Ref, version_name

from .storage import Storage

_EXPIRED = "expired"


class Ledger:
    """The numbers of one kind in one run."""

    def __init__(self, storage: Storage, run: str, kind: str) -> None:
        self._storage = storage
        self._run = run
        self._kind = kind
        self._prefix = f"{run}/{kind}/.ledger"

    def content_hashes(self) -> dict[int, str]:
        """The content hash that each number was given to; empty where its manifest was torn."""
        pairs = [name.split(".", 1) for name in self._names()]
        return {int(name[1:]): suffix for name, suffix in pairs if suffix != _EXPIRED}

    def prepare(self) -> None:
        """Make its folder, before a version is published beside it: the index trusts the kind's
        folder by its times."""
        self._storage.make_prefix(self._prefix)

    def note(self, manifest: Manifest) -> None:
        """Its number is given, for good: the version is visible."""
        self.prepare()
        self._storage.write(self._key(manifest.version, manifest.content_hash), manifest.to_json())
        self._storage.delete(self._key(manifest.version, _EXPIRED))

    def note_missing(self, visible: list[int]) -> None:
        """Note the visible versions that are not noted yet: those of an earlier Quiver, and those
        whose process died just then."""
        for number in sorted(set(visible) - set(self.content_hashes())):
            manifest = self._read(f"{Ref(self._run, self._kind, number).folder}/manifest.json")
            if manifest is not None:
                self.note(manifest)
            else:
                self.prepare()
                self._storage.write(self._key(number, ""), b"")

    def next_number(self, first: int, content_hash: str | None, visible: list[int]) -> int:
        """The number of the next version: that of a deleted one with this content, otherwise the
        one after the highest that was ever given, or `first`. `visible`: numbers that are there."""
        self.note_missing(visible)
        given = self.content_hashes()
        for number, content_hash_then in given.items():
            if content_hash_then == content_hash and number not in visible:
                return number
        return max([first - 1, *given, *visible]) + 1

    def manifest(self, number: int) -> Manifest | None:
        """The manifest of a version, also of one that is gone; None where it is not known."""
        return self._read(self._key(number, self.content_hashes().get(number, "")))

    def _read(self, key: str) -> Manifest | None:
        with suppress(CorruptError, FileNotFoundError, NotADirectoryError):
            return from_json(self._storage.read(key), key)
        return None

    def _key(self, number: int, suffix: str) -> str:
        return f"{self._prefix}/{version_name(number)}.{suffix}"

    # -- versions that were deleted on purpose

    def expire(self, number: int, why: str) -> None:
        """Say that the version is deleted on purpose, before it is."""
        fields = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "why": why}
        line = json.dumps({**fields, "checksum": digest(fields)})
        self._storage.write(self._key(number, _EXPIRED), line.encode())

    def expiry(self, number: int) -> str:
        """When and why the version was deleted on purpose; empty where it was not."""
        try:
            fields = json.loads(self._storage.read(self._key(number, _EXPIRED)))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return ""
        return f"{fields.get('at')} {fields.get('why')}".strip()

    def _names(self) -> list[str]:
        return [name for name in self._storage.list(self._prefix) if not name.endswith(".tmp")]
