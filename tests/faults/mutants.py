"""Ways to get the protocol wrong: each must be noticed, or the tests of it prove nothing."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from unittest.mock import patch

from quiver.stages.core.files import replacing, sync
from quiver.stages.core.store import leases, listing, marks, retention, tags, writer
from quiver.stages.core.store.disk import Disk
from quiver.stages.core.store.storage import Stamp


@contextmanager
def _without_flush(is_meant: Callable[[int], bool]) -> Iterator[None]:
    real = os.fsync

    def fsync(handle: int) -> None:
        if not is_meant(os.fstat(handle).st_mode):
            real(handle)

    with patch.object(os, "fsync", fsync):
        yield


def files_are_not_flushed() -> AbstractContextManager:
    """No file is flushed."""
    return _without_flush(stat.S_ISREG)


def folders_are_not_flushed() -> AbstractContextManager:
    """No folder is flushed."""
    return _without_flush(stat.S_ISDIR)


def _publishing(do: Callable[[Path, Path, bytes], None], *, is_private: bool = True):
    """Publish in another way, given the folder, that of the version, and its manifest."""

    def publish(self, work: str, token: str, target: str, manifest: bytes, sizes: dict) -> bool:
        private, folder = self.local(f"{work}.{token}" if is_private else work), self.local(target)
        if folder.exists():
            return False
        if is_private and not private.is_dir():
            self.local(work).rename(private)
        for name in self.files(os.path.relpath(private, self.local(""))).keys() - sizes.keys():
            (private / name).unlink()
        do(private, folder, manifest)
        sync(folder.parent)
        return True

    return patch.object(Disk, "publish", publish)


def _write(path: Path, raw: bytes) -> None:
    with replacing(path) as file:
        file.write(raw)


def manifest_before_data() -> AbstractContextManager:
    """The version is visible with its manifest, and its files follow."""

    def do(private: Path, folder: Path, manifest: bytes) -> None:
        folder.mkdir()
        _write(folder / "manifest.json", manifest)
        for path in private.iterdir():
            path.rename(folder / path.name)
        sync(folder)

    return _publishing(do)


def manifest_in_place() -> AbstractContextManager:
    """The manifest is written where it stays, after the rename."""

    def do(private: Path, folder: Path, manifest: bytes) -> None:
        sync(private)
        private.rename(folder)
        _write(folder / "manifest.json", manifest)

    return _publishing(do)


def folder_is_shared() -> AbstractContextManager:
    """Who publishes a folder does not take it for itself first."""

    def do(shared: Path, folder: Path, manifest: bytes) -> None:
        _write(shared / "manifest.json", manifest)
        shared.rename(folder)

    return _publishing(do, is_private=False)


def reclaimed_file_by_file() -> AbstractContextManager:
    """What a sleeper was publishing is taken back without hiding it from him first."""

    def take_back(self, work: str, token: str) -> None:
        place, _, name = work.rpartition("/")
        for other in self.list(place):
            if re.fullmatch(rf"{name}\.{token}", other):
                with suppress(FileNotFoundError):
                    self.local(work).mkdir(exist_ok=True)
                    for path in self.local(f"{place}/{other}").iterdir():
                        path.rename(self.local(work) / path.name)

    return patch.object(Disk, "_take_back", take_back)


def number_is_just_taken() -> AbstractContextManager:
    """A version that has the number already is replaced."""
    real = Disk.publish

    def publish(self, work: str, token: str, target: str, *about) -> bool:
        is_published = real(self, work, token, target, *about)
        while not is_published:
            self.delete(f"{target}/")
            is_published = real(self, work, token, target, *about)
        return True

    return patch.object(Disk, "publish", publish)


def number_is_of_a_stale_listing() -> AbstractContextManager:
    """The number is not looked up again when another process has taken it."""
    real = writer.Writer._next_number

    def next_number(self, listing) -> int:
        self.number = getattr(self, "number", None) or real(self, listing)
        return self.number

    return patch.object(writer.Writer, "_next_number", next_number)


def run_key_is_looked_up_once() -> AbstractContextManager:
    """Whether the version is there is asked at the beginning only."""
    real = writer.Writer.is_committed

    def is_committed(self, listing=None) -> bool:
        self.answer = getattr(self, "answer", None) or (real(self, listing),)
        return self.answer[0]

    return patch.object(writer.Writer, "is_committed", is_committed)


def lease_is_not_looked_at() -> AbstractContextManager:
    """Nobody looks whether another has taken the work over."""
    return patch.object(leases.Lease, "is_held", lambda self: True)


def _putting(
    key_part: str, put: Callable[[Disk, str, bytes], Stamp | None]
) -> AbstractContextManager:
    """Put some objects in another way."""
    real = Disk.put_if_absent

    def put_if_absent(self, key: str, data: bytes, **options) -> Stamp | None:
        return put(self, key, data) if key_part in key else real(self, key, data, **options)

    return patch.object(Disk, "put_if_absent", put_if_absent)


def tag_is_just_written() -> AbstractContextManager:
    """An entry of a tag is written whether there is one or not."""
    return _putting("/tags/", lambda self, key, data: self.put(key, data))


def mark_is_not_flushed() -> AbstractContextManager:
    """Data are deleted before the mark that says so is on the disk."""
    real = Disk.put_if_absent
    return _putting(
        f".{listing.REMOVED}", lambda self, key, data: real(self, key, data, durable=False)
    )


def data_before_mark() -> AbstractContextManager:
    """Data are deleted, then a mark says so."""
    real = marks.write

    def write(storage: Disk, ref, name: str, why: str, **fields) -> None:
        for file in storage.files(ref.folder).keys() - {"manifest.json"}:
            storage.delete(f"{ref.folder}/{file}")
        real(storage, ref, name, why, **fields)

    return patch.object(marks, "write", write)


def note_before_bytes() -> AbstractContextManager:
    """A shard counts before it is there."""
    real = Disk.put_if_absent
    shards: list[tuple[str, bytes]] = []

    def put_if_absent(self, key: str, data: bytes, **options) -> Stamp | None:
        if key.endswith(".arrow"):
            shards.append((key, data))
            return ("not yet",)
        stamp = real(self, key, data, **options)
        while "/part-" in key and shards:
            real(self, *shards.pop())
        return stamp

    return patch.object(Disk, "put_if_absent", put_if_absent)


def gc_looks_once() -> AbstractContextManager:
    """A collection does not look again for tags and stages once it has marked."""
    real, kept = retention.find_kept, {}
    return patch.object(
        retention,
        "find_kept",
        lambda store, *rule: kept.setdefault(store.url, real(store, *rule)),
    )


def tag_looks_for_no_mark() -> AbstractContextManager:
    """A tag is moved, and nobody looks whether its version expired meanwhile."""
    real = tags.Tag.move
    return patch.object(tags.Tag, "move", lambda *arguments: real(*arguments) and None)


NOTICED_BY_A_POWER_LOSS = {
    files_are_not_flushed: "alone",
    folders_are_not_flushed: "alone",
    manifest_before_data: "alone",
    manifest_in_place: "alone",
    mark_is_not_flushed: "rm",
}
NOTICED_BY_A_KILL = {note_before_bytes: "alone", data_before_mark: "rm"}
NOTICED_BY_TWO_WRITERS = {
    number_is_just_taken: "other work",
    number_is_of_a_stale_listing: "other work",
    lease_is_not_looked_at: "the same work",
    run_key_is_looked_up_once: "shared work",
    folder_is_shared: "the same work",
    reclaimed_file_by_file: "the same work",
    tag_is_just_written: "a tag",
    tag_looks_for_no_mark: "a tag beside gc",
    gc_looks_once: "a tag beside gc",
}
"""Each with the scene or contest that shows it."""
