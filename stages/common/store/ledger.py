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
import re
from contextlib import suppress
from datetime import UTC, datetime

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest, digest, from_json
from quiver.schemas.refs import Ref, version_name

from .storage import Storage

_EXPIRED = "expired"
_NAME = re.compile(r"v([0-9]{6,})\.([0-9a-f]{64}|)")
"""Of a manifest's copy; whatever else lies there is nobody's."""


class Ledger:
    """The numbers of one kind in one run."""

    def __init__(self, storage: Storage, run: str, kind: str) -> None:
        self._storage = storage
        self._run = run
        self._kind = kind
        self._prefix = f"{run}/{kind}/.ledger"

    def content_hashes(self) -> dict[int, str]:
        """The content hash that each number was given to; empty where its manifest was torn."""
        matches = map(_NAME.fullmatch, self._storage.list(self._prefix))
        return {int(match[1]): match[2] for match in matches if match}

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

    def next_number(self, first: int, visible: list[int]) -> int:
        """The one after the highest that was ever given, or `first`. `visible`: numbers of the
        versions that are there."""
        self.note_missing(visible)
        return max([first - 1, *self.content_hashes(), *visible]) + 1

    def number_of_deleted(
        self, content_hash: str, run_key: str | None, visible: list[int]
    ) -> int | None:
        """The number of a deleted version with this content that was made of the same (`run_key`;
        None: of whatever); None where there is none."""
        for number, content_hash_then in self.content_hashes().items():
            if content_hash_then == content_hash and number not in visible:
                manifest = self.manifest(number)
                if run_key is None or manifest is None or manifest.run_key == run_key:
                    return number
        return None

    def problems(self) -> list[CorruptError]:
        """Copies of manifests that are not what was written, and tombstones that can not be
        read."""
        errors = []
        for number, content_hash in self.content_hashes().items():
            manifest = self.manifest(number)
            if content_hash and (manifest is None or manifest.content_hash != content_hash):
                key = self._key(number, content_hash)
                next = f"rm {self._storage.path(key)}"
                errors.append(CorruptError(key, "is not the manifest that was written", next=next))
            try:
                self.expiry(number)
            except CorruptError as error:
                errors.append(error)
        return errors

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
        self._storage.sync_names(self._prefix)  # the files go only after that

    def expiry(self, number: int) -> str:
        """When and why the version was deleted on purpose; empty where it was not.
        CorruptError."""
        key = self._key(number, _EXPIRED)
        try:
            fields = json.loads(self._storage.read(key))
            checksum = fields.pop("checksum")
            is_whole = checksum == digest(fields)
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            is_whole = False
        if not is_whole:
            raise CorruptError(
                key,
                "the note that the version was deleted on purpose can not be read",
                state="the version is gone; its manifest is kept.",
                next=f"rm {self._storage.path(key)}",
            )
        return f"{fields['at']} {fields['why']}".strip()
