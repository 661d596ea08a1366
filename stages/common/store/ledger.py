"""The ledger of one kind in one run: every number that was ever given, also to what is gone since.

    STORE/<run>/<kind>/.ledger/v000003.4be1c0…    its manifest; the name ends in its content hash
    STORE/<run>/<kind>/.ledger/v000003.expired    it was deleted on purpose: when and why

A number is never given to other content. The folder of a version may be deleted, by `quiver rm` or
by hand; its manifest stays here (a second link to the same file), and the number comes back only
with the very same content, so that what was made of it is whole again.

Only names are read to choose a number, so that costs two listings however many versions there are.
A process that dies between publishing a version and noting it leaves that to whoever comes next.
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

    def note(self, number: int, content_hash: str) -> None:
        """Number `number` is given, for good: its version is visible."""
        manifest = f"{Ref(self._run, self._kind, number).folder}/manifest.json"
        self._storage.link(manifest, f"{self._prefix}/{version_name(number)}.{content_hash}")
        self._storage.delete(self._expiry(number))

    def note_missing(self, visible: list[int]) -> None:
        """Note the visible versions that are not noted yet: those of an earlier Quiver, and those
        whose process died just then."""
        for number in sorted(set(visible) - set(self.content_hashes())):
            with suppress(FileNotFoundError):  # it has no manifest, or was deleted meanwhile
                manifest = self._read(f"{Ref(self._run, self._kind, number).folder}/manifest.json")
                self.note(number, manifest.content_hash if manifest else "")

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
        """The manifest of a version that was deleted; None where nothing is known of it."""
        content_hash = self.content_hashes().get(number)
        if content_hash is None:
            return None
        return self._read(f"{self._prefix}/{version_name(number)}.{content_hash}")

    def _read(self, key: str) -> Manifest | None:
        with suppress(CorruptError):
            return from_json(self._storage.read(key), key)
        return None

    # -- versions that were deleted on purpose

    def expire(self, number: int, why: str) -> None:
        """Say that the version is deleted on purpose, before it is."""
        fields = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "why": why}
        line = json.dumps({**fields, "checksum": digest(fields)})
        self._storage.write(self._expiry(number), line.encode())

    def is_expired(self, number: int) -> bool:
        """Whether the version was deleted on purpose."""
        return f"{version_name(number)}.{_EXPIRED}" in self._names()

    def _expiry(self, number: int) -> str:
        return f"{self._prefix}/{version_name(number)}.{_EXPIRED}"

    def _names(self) -> list[str]:
        return [name for name in self._storage.list(self._prefix) if not name.endswith(".tmp")]
