"""Seven ways to get the protocol wrong: each must be noticed, or the tests of it prove nothing."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

from quiver.stages.core.store import leases, storage


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


def manifest_before_data() -> AbstractContextManager:
    """The version is visible with its manifest, and its files follow."""

    def publish(folder: Path, target: Path) -> bool:
        if target.exists():
            return False
        target.mkdir()
        for path in sorted(folder.iterdir(), key=lambda path: path.name != "manifest.json"):
            path.rename(target / path.name)
        storage.sync(target)
        storage.sync(target.parent)
        return True

    return patch.object(storage, "publish", publish)


def manifest_in_place() -> AbstractContextManager:
    """The manifest is written where it stays, after the rename."""
    real = storage.publish

    def publish(folder: Path, target: Path) -> bool:
        raw = (folder / "manifest.json").read_bytes()
        (folder / "manifest.json").unlink()
        is_published = real(folder, target)
        with open((target if is_published else folder) / "manifest.json", "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        return is_published

    return patch.object(storage, "publish", publish)


def number_is_just_taken() -> AbstractContextManager:
    """A folder that has the number already is replaced."""
    real = storage.publish

    def publish(folder: Path, target: Path) -> bool:
        shutil.rmtree(target, ignore_errors=True)
        return real(folder, target)

    return patch.object(storage, "publish", publish)


def lease_is_not_looked_at() -> AbstractContextManager:
    """Nobody looks whether another has taken the work over."""
    return patch.object(leases.Lease, "is_held", lambda self: True)


def tag_is_just_written() -> AbstractContextManager:
    """An entry of a tag's journal is written whether there is one or not."""
    real = storage.Storage.put_if_absent

    def put_if_absent(self, key: str, data: bytes, **options) -> bool:
        if "/tags/" not in key:
            return real(self, key, data, **options)
        self.write(key, data)
        return True

    return patch.object(storage.Storage, "put_if_absent", put_if_absent)


NOTICED_BY_A_POWER_LOSS = (
    files_are_not_flushed,
    folders_are_not_flushed,
    manifest_before_data,
    manifest_in_place,
)
NOTICED_BY_TWO_WRITERS = {
    number_is_just_taken: "other work",
    lease_is_not_looked_at: "the same work",
    tag_is_just_written: "a tag",
}
