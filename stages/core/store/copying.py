"""Copy a store to another place: a folder or a bucket, each way.

Each file is compared with its manifest before and after, and appears whole or not at all. A file
that exists with the right size is not copied again. A manifest comes after its files, and
`store.json` last. So a copy that was interrupted is no store yet; the same call continues it, also
beside another one. Unfinished work is left out, and data that expired or were removed.

    copied = copy(Store("store"), "s3://bucket/rl")

Not of the spine: `quiver store copy` is the only caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from quiver.schemas.errors import ConfigError, ConflictError, LineageError
from quiver.schemas.manifest import FileEntry
from quiver.schemas.refs import Ref
from quiver.stages.core.files import storage_errors
from quiver.stages.core.threads import map_in_threads

from . import marks
from .listing import EXPIRED, NO_OPTIMIZER, REMOVED
from .places import locate, open_storage
from .retention import folders_of
from .storage import Storage
from .versions import Store, Version

_UNFINISHED = "store.json.copying"
"""Object that a copy has until it is finished: the later `store.json`."""


@dataclass
class Copied:
    """Result of a copy."""

    versions: int = 0
    """Versions in the copy, by their manifests."""
    bytes: int = 0
    """Bytes of files that were copied now, not by an earlier call."""


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
        for run, kind in source.kinds():
            listing = source.listing(run, kind)
            for name, numbers in listing.marks.items():
                for number in numbers:
                    with suppress(FileNotFoundError):  # taken back meanwhile
                        _copy_mark(source.storage, storage, Ref(run, kind, number), name)
            for number in listing.numbers:
                version = source.version(Ref(run, kind, number))
                manifest = f"{version.ref.folder}/manifest.json"
                if number not in listing.marks[REMOVED]:
                    version.manifest  # noqa: B018  a torn or missing one is an error
                    # another version's files stay as they are
                    _is_there(storage, manifest, source.storage.read(manifest))
                    if marks.read(storage, version.ref, EXPIRED) is None:
                        copied.bytes += _copy_files(version, source.storage, storage)
                with suppress(FileNotFoundError):  # a version without a manifest may be removed
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
    try:
        markers = {target.read(name) for name in ("store.json", _UNFINISHED) if name in names}
    except FileNotFoundError:  # another copy ended just now
        _claim(target, marker)
        return
    if markers == {marker}:
        return
    if names:
        raise ConfigError(
            f"store {target.url}",
            "is another store, or holds other things",
            next="name an empty or new folder",
        )
    is_ours = target.put_if_absent(_UNFINISHED, marker, flush_name=True)
    try:  # meanwhile a copy of another store may have been begun, or even ended
        _claim(target, marker)
    except ConfigError:
        if is_ours:
            target.delete(_UNFINISHED)
        raise


def _copy_files(version: Version, source: Storage, target: Storage) -> int:
    """Copy the files of a version that did not expire, and the marks of those that did, perhaps
    since the marks were listed.

    Returns the bytes of the files, without those of files that were copied before. Raises
    ConflictError if files were left out for a mark that was taken back since.
    """
    manifest = version.manifest
    there = target.files(manifest.prefix)
    entries, expired = [], set()
    for entry in manifest.files:
        try:
            version.require(entry.name)
        except LineageError:
            expired.add(EXPIRED if version.mark else NO_OPTIMIZER)
            continue
        if entry.name not in there or there[entry.name][0] != entry.bytes:
            entries.append(entry)
    try:
        for name in expired:
            _copy_mark(source, target, version.ref, name)
    except FileNotFoundError:
        problem = "its mark that data expired was taken back while it was copied"
        raise ConflictError(str(version.ref), problem, next="copy again: it goes on") from None

    def copy_file(entry: FileEntry) -> int:
        version.verify(entry.name)
        key = f"{manifest.prefix}/{entry.name}"
        if target.put_file(key, version.files.path(entry.name)) != (entry.bytes, entry.sha256):
            raise version.corrupt(entry.name, "changed while it was copied")
        return entry.bytes

    return sum(map_in_threads(copy_file, entries))


def _copy_mark(source: Storage, target: Storage, ref: Ref, name: str) -> None:
    """Copy a mark of a version, unless the copy has one of its own: a collection there writes its
    own time and reason."""
    own, mark = (marks.read(storage, ref, name) for storage in (target, source))
    if own is None or mark is None or own.commit_id != mark.commit_id:
        _copy_objects(source, target, [marks.key_of(ref, name)])


def _copy_objects(source: Storage, target: Storage, keys: Iterable[str]) -> None:
    """Copy small objects. Raises ConflictError if one exists with other bytes."""
    for key in keys:
        raw = source.read(key)
        while not _is_there(target, key, raw):
            target.put_if_absent(key, raw, flush_name=True)


def _is_there(target: Storage, key: str, raw: bytes) -> bool:
    """Return True if the copy has this object. Raises ConflictError if it has other bytes."""
    try:
        if target.read(key) == raw:
            return True
    except FileNotFoundError:
        return False
    raise ConflictError(
        f"{target.url}/{key}",
        "differs from the source",
        next="copy to an empty folder or bucket",
    )
