"""Copy a store to another place: a folder or a bucket, each way.

Each file is compared with its manifest before and after. A manifest comes after its files, and
`store.json` last. So a copy that was interrupted is no store yet; the same call goes on with it.
Unfinished work is left out, and data that expired or were removed.

    copied = copy(Store("store"), "s3://bucket/rl")

Not of the spine: `quiver store copy` is the only caller.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product

from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, LineageError
from quiver.schemas.manifest import FileEntry
from quiver.schemas.refs import KINDS, Ref
from quiver.stages.core.files import storage_errors
from quiver.stages.core.threads import map_in_threads

from . import marks
from .listing import REMOVED
from .places import locate, open_storage
from .retention import folders_of
from .storage import Storage, size_and_sha256
from .versions import Store, Version

_UNFINISHED = "store.json.copying"
"""Object that a copy has until it is finished: the later `store.json`."""


@dataclass
class Copied:
    """Result of a copy."""

    versions: int = 0
    """Versions in the copy, by their manifests."""
    bytes: int = 0
    """Bytes of files that were copied; those that were there already do not count."""


def copy(source: Store, target: str) -> Copied:
    """Copy all versions, marks and tags to a folder or bucket.

    Args:
        target: path or URL; it must be empty, hold a copy of this store, or one that was
            interrupted.

    Raises:
        ConfigError: `target` is another store.
        CorruptError: a version of the source is torn.
        ConflictError: an object of the copy differs from the source's.
    """
    url = locate(target)
    storage = open_storage(url)
    copied = Copied()
    with storage_errors(f"store {url}"):
        for key in folders_of(source):
            source.storage.list(key)  # a run that is a link would be left out
        _claim(storage, source.storage.read("store.json"))
        # listed first: a version that is made meanwhile is not copied, nor a tag that names it
        entries = [
            f"{run}/tags/{name}/{entry}"
            for run in source.runs()
            for name in source.tag_names(run)
            for entry in source.storage.list(f"{run}/tags/{name}")
        ]
        for run, kind in product(source.runs(), KINDS):
            listing = source.listing(run, kind)
            for name, numbers in listing.marks.items():
                keys = (marks.key_of(Ref(run, kind, number), name) for number in numbers)
                _copy_objects(source.storage, storage, keys)
            for number in listing.numbers:
                version = source.version(Ref(run, kind, number))
                if number not in listing.marks[REMOVED]:
                    copied.bytes += _copy_files(version, storage)
                with suppress(FileNotFoundError):  # a version without a manifest may be removed
                    manifest = f"{version.ref.folder}/manifest.json"
                    _copy_objects(source.storage, storage, [manifest])
                copied.versions += 1
        _copy_objects(source.storage, storage, [*entries, "store.json"])
        storage.delete(_UNFINISHED)
    return copied


def _claim(target: Storage, marker: bytes) -> None:
    """Mark `target` as a copy that is being made of the store with this `store.json`.

    Raises ConfigError if it is another store, or holds other things.
    """
    names = target.list("")
    for name in ("store.json", _UNFINISHED):
        if name in names:
            if target.read(name) == marker:
                return
            raise ConfigError(
                f"store {target.url}", "is another store", next="name an empty folder"
            )
    if names:
        raise ConfigError(
            f"store {target.url}", "holds other things", next="name an empty or new folder"
        )
    target.put_if_absent(_UNFINISHED, marker, flush_name=True)


def _copy_files(version: Version, target: Storage) -> int:
    """Copy the files of a version that did not expire. Returns their bytes; those that are there
    already do not count."""
    manifest = version.manifest
    entries = []
    for entry in manifest.files:
        with suppress(LineageError):
            version.require(entry.name)
            entries.append(entry)

    def copy_file(entry: FileEntry) -> int:
        key = f"{manifest.prefix}/{entry.name}"
        with suppress(FileNotFoundError, CorruptError):
            if size_and_sha256(target, key) == (entry.bytes, entry.sha256):
                return 0
        version.verify(entry.name)
        file = target.folder(key.rpartition("/")[0]) / key.rpartition("/")[2]
        shutil.copyfile(version.files.path(entry.name), file)
        if target.put_file(key) != (entry.bytes, entry.sha256):
            raise version.corrupt(entry.name, "changed while it was copied")
        return entry.bytes

    return sum(map_in_threads(copy_file, entries))


def _copy_objects(source: Storage, target: Storage, keys: Iterable[str]) -> None:
    """Copy small objects.

    Raises ConflictError if one is there with other bytes.
    """
    for key in keys:
        raw = source.read(key)
        if not target.put_if_absent(key, raw, flush_name=True) and target.read(key) != raw:
            raise ConflictError(
                f"{target.url}/{key}",
                "differs from the source",
                next="copy to an empty folder or bucket",
            )
