"""The ledger of one kind in one run: every number that was ever given, also to what is gone since.

    STORE/<run>/<kind>/.ledger/v000003.4be1c0…    its manifest; the name ends in its content hash
    STORE/<run>/<kind>/.ledger/v000003.expired    its files were taken away: when and why
    STORE/<run>/policy/.ledger/v000003.expired.optimizer    so was that folder of its files
    STORE/<run>/<kind>/.ledger/highest-000003     stays where all of v000003* is deleted

A number is never given to other content. The folder of a version may be taken away, by `quiver gc`,
`quiver rm` or by hand; a copy of its manifest stays here, and the number comes back only with the
very same content, so that what was made of it is whole again.

A tombstone is written before the files go, and names the version by its commit. As long as they are
there the version is what it was, with or without a tombstone.

Only names are read to choose a number, so that costs a few listings however many versions there
are. A process that dies between publishing a version and noting it leaves that to the next one.

Not of the spine: its readers need to know only that a number is never given twice.
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
"""A reference has 12 digits at most."""
OPTIMIZER_FOLDER = "optimizer"
"""Below a policy's files: its optimizer state, which may be taken away before the rest."""
_NAME = re.compile(r"^v([0-9]{6,12})\.([0-9a-f]{64}|)$", re.MULTILINE)
"""Of a manifest's copy; whatever else lies there is nobody's."""
_HIGHEST_NAME = re.compile(r"^highest-([0-9]{6,12})$", re.MULTILINE)
_TOMBSTONE_NAME = re.compile(rf"v([0-9]{{6,12}})\.expired(?:\.({OPTIMIZER_FOLDER}))?")


@dataclass(frozen=True)
class Tombstone:
    """That a version, or one folder of its files, was taken away on purpose."""

    at: str
    """UTC, ISO 8601."""
    why: str
    commit_id: str = ""
    """Of the version that was meant. Empty where nobody could tell."""
    expired: bool = False
    """Its time was over: the manifest goes on answering whether the work is done. False: somebody
    deleted it, and whoever asks for it makes it again."""
    files: Mapping[str, str] = field(default_factory=dict)
    """What plans read of it beside the manifest: texts of small files, by name."""

    def __str__(self) -> str:
        return f"{self.at} {printable(self.why)}".strip()


class Ledger:
    """The numbers of one kind in one run."""

    def __init__(self, storage: Storage, run: str, kind: str) -> None:
        self._storage = storage
        self._run = run
        self._kind = kind
        self._prefix = f"{run}/{kind}/.ledger"

    def content_hashes(self) -> dict[int, str]:
        """The content hash that each number was given to; empty where its manifest was torn."""
        names = "\n".join(self._storage.list(self._prefix))
        return {int(digits): content_hash for digits, content_hash in _NAME.findall(names)}

    def prepare(self) -> None:
        """Make its folder, before a version is published beside it: the index trusts the kind's
        folder by its times."""
        self._storage.make_prefix(self._prefix)

    def note(self, manifest: Manifest) -> None:
        """Its number is given, for good: the version is visible."""
        self.write_copy(manifest)
        self._note_highest([manifest.version])
        for folder in ("", OPTIMIZER_FOLDER):
            self.take_back(manifest.version, folder)

    def write_copy(self, manifest: Manifest) -> None:
        """Keep a copy of the manifest, which outlives the version."""
        self.prepare()
        self._storage.write(self._key(manifest.version, manifest.content_hash), manifest.to_json())

    def note_missing(self, visible: list[int]) -> set[int]:
        """Note the visible versions that are not noted yet: those whose process died just then. All
        numbers that were given."""
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
        """Note the highest number that was ever given; that number, or -1."""
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
        """The one after the highest that was ever given, or `first`. `visible`: numbers of the
        versions that are there."""
        highest = max({first - 1, *self.note_missing(visible)})
        if highest >= MOST_VERSION:
            name = f"{self._run}/{self._kind}"
            next = f"quiver doctor --quarantine {name}@{highest}"
            raise CorruptError(name, f"{highest} is the highest number there can be", next=next)
        return highest + 1

    def number_of_deleted(
        self, content_hash: str, run_key: str | None, visible: list[int]
    ) -> int | None:
        """The number of a deleted version with this content that was made of the same (`run_key`;
        None: of whatever); None where there is none."""
        content_hashes = self.content_hashes()
        for number in sorted(content_hashes.keys() - set(visible)):
            if content_hashes[number] == content_hash:
                manifest = self.manifest(number)
                if run_key is None or manifest is None or manifest.run_key == run_key:
                    return number
        return None

    def problems(self) -> list[CorruptError]:
        """Copies of manifests that are not what was written, and tombstones that cannot be
        read."""
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
        """The manifest of a version, also of one that is gone; None where it is not known."""
        return self._read(self._key(number, self.content_hashes().get(number, "")))

    def _read(self, key: str) -> Manifest | None:
        with suppress(CorruptError, FileNotFoundError, NotADirectoryError):
            return from_json(self._storage.read(key), key)
        return None

    def _key(self, number: int, suffix: str) -> str:
        return f"{self._prefix}/{version_name(number)}.{suffix}"

    # -- versions that were taken away on purpose

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
        """Say that the version, or a folder of its files, is taken away, before it is."""
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        fields = asdict(Tombstone(at, why, commit_id, expired, files or {}))
        line = json.dumps({**fields, "checksum": digest(fields)})
        self.prepare()
        self._storage.write(self._tombstone_key(number, folder), line.encode())
        self._storage.sync_names(self._prefix)  # the files go only after that

    def take_back(self, number: int, folder: str = "") -> None:
        """Forget the tombstone: the files are there, and stay."""
        self._storage.delete(self._tombstone_key(number, folder))

    def tombstones(self) -> list[tuple[int, str]]:
        """Number and folder of every tombstone, rising; no folder where it is the version's."""
        matches = filter(None, map(_TOMBSTONE_NAME.fullmatch, self._storage.list(self._prefix)))
        return [(int(match[1]), match[2] or "") for match in matches]

    def has_tombstone(self, number: int) -> bool:
        """Whether the version is to go, or is gone."""
        return self._storage.exists(self._tombstone_key(number, ""))

    def tombstone_stamp(self, number: int) -> tuple[int, ...]:
        """What changes where the version is taken away again."""
        return self._storage.stamp(self._tombstone_key(number, "")) or ()

    def tombstone(self, number: int, folder: str = "") -> Tombstone | None:
        """When and why the version, or a folder of its files, was taken away; None where it was
        not. CorruptError."""
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
