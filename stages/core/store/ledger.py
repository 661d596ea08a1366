"""The ledger of one kind in one run: every version number ever given, including deleted versions.

    STORE/<run>/<kind>/.ledger/v000003.4be1c0…    its manifest; the name ends in its content hash
    STORE/<run>/<kind>/.ledger/v000003.expired    tombstone: when and why its files were deleted
    STORE/<run>/policy/.ledger/v000003.expired.optimizer    tombstone of its optimizer folder alone
    STORE/<run>/<kind>/.ledger/highest-000003     stays if all of v000003* is deleted

A number is never given to other content. A version's folder may be deleted by `quiver gc`,
`quiver rm` or by hand, but the copy of its manifest stays here. The number is given again only to
the very same content, so versions made from the deleted one have a valid input again.

A tombstone is written before the files are deleted, and names the version by its commit id. As long
as the files exist, a tombstone changes nothing.

Choosing a number reads only names, so it costs a few listings however many versions there are. If a
process dies between publishing a version and noting it here, the next process notes it.

Not of the spine: its readers need to know only that a number is never reused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime

from quiver.schemas.errors import CorruptError, printable
from quiver.schemas.manifest import Manifest, digest, from_json
from quiver.schemas.plain import read_json
from quiver.schemas.refs import Ref, version_name

from .storage import Storage

MOST_VERSION = 10**12 - 1
"""Highest number of a version: a reference has at most 12 digits."""
OPTIMIZER_FOLDER = "optimizer"
"""Folder of a policy's optimizer state, which may be deleted before the other files."""
_NAME = re.compile(r"^v([0-9]{6,12})\.([0-9a-f]{64}|)$", re.MULTILINE)
"""Name of a manifest's copy. Other files in the folder are ignored."""
_HIGHEST_NAME = re.compile(r"^highest-([0-9]{6,12})$", re.MULTILINE)
_TOMBSTONE_NAME = re.compile(rf"v([0-9]{{6,12}})\.expired(?:\.({OPTIMIZER_FOLDER}))?")


@dataclass(frozen=True)
class Tombstone:
    """A record that a version, or one folder of its files, was deleted on purpose."""

    at: str
    """UTC, ISO 8601."""
    why: str
    commit_id: str = ""
    """Commit id of the deleted version; empty if it could not be read."""
    expired: bool = False
    """True: deleted by age, and its manifest still proves that the work is done. False: a user
    deleted it, and a stage that needs it makes it again.
    """
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts of small files that plans read beside the manifest, by name."""

    def __str__(self) -> str:
        return f"{self.at} {printable(self.why)}".strip()


class Ledger:
    """All numbers given to versions of one kind in one run."""

    def __init__(self, storage: Storage, run: str, kind: str) -> None:
        self._storage = storage
        self._run = run
        self._kind = kind
        self._prefix = f"{run}/{kind}/.ledger"

    def content_hashes(self) -> dict[int, str]:
        """Return the content hash of each number given; empty if its manifest was torn."""
        names = "\n".join(self._storage.list(self._prefix))
        return {int(digits): content_hash for digits, content_hash in _NAME.findall(names)}

    def prepare(self) -> None:
        """Create the ledger's folder. Call before publishing a version beside it, because the index
        trusts the kind's folder by its modification time.
        """
        self._storage.make_prefix(self._prefix)

    def note(self, manifest: Manifest) -> None:
        """Record that the manifest's number is given for good. Call once the version is visible."""
        self.write_copy(manifest)
        self._note_highest([manifest.version])
        for folder in ("", OPTIMIZER_FOLDER):
            self.take_back(manifest.version, folder)

    def write_copy(self, manifest: Manifest) -> None:
        """Keep a copy of the manifest that outlives the version."""
        self.prepare()
        self._storage.write(self._key(manifest.version, manifest.content_hash), manifest.to_json())

    def note_missing(self, visible: list[int]) -> set[int]:
        """Note visible versions that are not noted because their process died first.

        Returns:
            All numbers ever given; -1 is among them if there are none.
        """
        noted = set(self.content_hashes())
        for number in sorted(set(visible) - noted):
            manifest = self._read(f"{Ref(self._run, self._kind, number).folder}/manifest.json")
            if manifest is not None and manifest.version == number:
                self.note(manifest)
            elif number < MOST_VERSION:  # torn, or a copy of another version
                self.prepare()
                self._storage.write(self._key(number, ""), b"")
        numbers = noted.union(visible)
        return numbers | {self._note_highest(numbers)}

    def _note_highest(self, numbers: Collection[int]) -> int:
        """Note the highest number ever given, and return it, or -1 if there is none."""
        names = "\n".join(self._storage.list(self._prefix))
        earlier = [int(digits) for digits in _HIGHEST_NAME.findall(names)]
        highest = max((number for number in numbers if number < MOST_VERSION), default=-1)
        if highest > max(earlier, default=-1):
            self.prepare()
            key = f"{self._prefix}/highest-"
            self._storage.put_if_absent(f"{key}{highest:06d}", b"", durable=False)
            for number in earlier:
                self._storage.delete(f"{key}{number:06d}")
        return max([*earlier, highest])

    def next_number(self, first: int, visible: list[int]) -> int:
        """Return the number after the highest one ever given, but at least `first`.

        Args:
            visible: numbers of the versions that exist now.

        Raises:
            CorruptError: the numbers are used up.
        """
        highest = max({first - 1, *self.note_missing(visible)})
        if highest >= MOST_VERSION:
            name = f"{self._run}/{self._kind}"
            next = f"quiver verify {name}@{highest} --quarantine"
            raise CorruptError(name, f"{highest} is the highest number there can be", next=next)
        return highest + 1

    def number_of_deleted(
        self, content_hash: str, run_key: str | None, visible: list[int]
    ) -> int | None:
        """Return the number of a deleted version with this content, or None.

        Args:
            run_key: the deleted version must have this run key. None: any run key.
            visible: numbers of the versions that exist now.
        """
        content_hashes = self.content_hashes()
        for number in sorted(content_hashes.keys() - set(visible)):
            if content_hashes[number] == content_hash:
                manifest = self.manifest(number)
                if run_key is None or manifest is None or manifest.run_key == run_key:
                    return number
        return None

    def problems(self) -> list[CorruptError]:
        """Return errors for damaged manifest copies and for unreadable tombstones."""
        errors = []
        for number, content_hash in self.content_hashes().items():
            manifest = self.manifest(number)
            if content_hash and (manifest is None or manifest.content_hash != content_hash):
                key = self._key(number, content_hash)
                folder = Ref(self._run, self._kind, number).folder
                next = "restore it from a copy: nothing else says what the deleted version was"
                if self._storage.path(folder).exists():
                    next = f"rm {self._storage.path(key)}"
                errors.append(CorruptError(key, "is not the manifest that was written", next=next))
        for number, folder in self.tombstones():
            try:
                self.tombstone(number, folder)
            except CorruptError as error:
                errors.append(error)
        return errors

    def manifest(self, number: int) -> Manifest | None:
        """Return the manifest of a version, visible or deleted, or None if it is unknown."""
        return self._read(self._key(number, self.content_hashes().get(number, "")))

    def _read(self, key: str) -> Manifest | None:
        with suppress(CorruptError, FileNotFoundError, NotADirectoryError):
            return from_json(self._storage.read(key), key)
        return None

    def _key(self, number: int, suffix: str) -> str:
        return f"{self._prefix}/{version_name(number)}.{suffix}"

    # -- versions deleted on purpose

    def expire(
        self,
        number: int,
        why: str,
        *,
        commit_id: str = "",
        expired: bool = False,
        files: Mapping[str, str] | None = None,
        folder: str = "",
    ) -> None:
        """Write the tombstone of a version, or of a folder of its files, before it is deleted."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields = asdict(Tombstone(at, why, commit_id, expired, files or {}))
        line = json.dumps({**fields, "checksum": digest(fields)})
        self.prepare()
        self._storage.write(self._tombstone_key(number, folder), line.encode())
        self._storage.sync_names(self._prefix)  # durable before the caller deletes the files

    def take_back(self, number: int, folder: str = "") -> None:
        """Delete the tombstone, because the files exist and stay."""
        self._storage.delete(self._tombstone_key(number, folder))

    def tombstones(self) -> list[tuple[int, str]]:
        """Return number and folder of every tombstone, rising; no folder for a whole version."""
        matches = filter(None, map(_TOMBSTONE_NAME.fullmatch, self._storage.list(self._prefix)))
        return [(int(match[1]), match[2] or "") for match in matches]

    def has_tombstone(self, number: int) -> bool:
        """Return True if the version is about to be deleted, or is deleted."""
        return self._storage.exists(self._tombstone_key(number, ""))

    def tombstone_stamp(self, number: int) -> tuple[int, ...]:
        """Return a stamp that changes if the version is deleted again; empty without tombstone."""
        return self._storage.stamp(self._tombstone_key(number, "")) or ()

    def tombstone(self, number: int, folder: str = "") -> Tombstone | None:
        """Return the tombstone of a version, or of a folder of its files; None if there is none.

        Raises CorruptError if it cannot be read.
        """
        key = self._tombstone_key(number, folder)
        try:
            fields = read_json(self._storage.read(key))
            checksum = fields.pop("checksum")
            if checksum == digest(fields):
                return Tombstone(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, AttributeError, TypeError, CorruptError):
            pass
        raise CorruptError(
            key,
            "the note that the version was deleted on purpose cannot be read",
            state="the version is gone; its manifest is kept.",
            next=f"rm {self._storage.path(key)}",
        )

    def _tombstone_key(self, number: int, folder: str) -> str:
        return self._key(number, f"expired.{folder}" if folder else "expired")
