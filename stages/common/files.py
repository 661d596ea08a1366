"""Bytes on disk: written whole, flushed, hashed, renamed. Nothing here knows what a version is.

Every write of the store goes through these functions, so a test can record them and replay each
state that a power loss may leave. A failed fsync is never tried again on the same file: the error
rises, and the file is not acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from quiver.schemas.errors import OutcomeUnknownError, QuiverError, ResourceError

_WHY = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "not permitted",
    errno.EIO: "input/output error",
    errno.EMFILE: "too many open files",
    errno.EFBIG: "a file is larger than the system allows",
}
_OWN = uuid.uuid4().hex[:8]  # of this process among those of all hosts that see the file
_RUST = re.compile(r"\(os error (\d+)\)$")


@contextlib.contextmanager
def storage(name: object) -> Iterator[None]:
    """Turn an operating system's error into ResourceError about `name`: full disk, read-only,
    input/output error."""
    try:
        yield
    except QuiverError:
        raise
    except Exception as error:
        why = _WHY.get(_number(error))
        if why is None:
            raise
        file = getattr(error, "filename", None)
        raise ResourceError(
            str(name),
            f"{why} ({os.path.basename(str(file))})" if file else why,
            state="every version that was there is intact; finished shards are kept and taken up "
            "again.",
            next="make room or make the store writable, then run the same command again",
        ) from error


def _number(error: Exception) -> int | None:
    """The system's number of an error. Libraries in Rust, such as safetensors, raise no OSError,
    but say it in their text."""
    if isinstance(error, OSError):
        return error.errno
    told = _RUST.search(str(error))
    return int(told[1]) if told else None


class _Hashing:
    """A file that hashes and counts what is written to it."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw, self.sha, self.bytes, self.closed = raw, hashlib.sha256(), 0, False

    def write(self, data) -> int:
        view = memoryview(data)
        self.sha.update(view)
        self.raw.write(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self.raw.flush()


@contextlib.contextmanager
def replacing(path: Path, *, first: bool = False) -> Iterator[_Hashing]:
    """A file to write; it appears under `path` whole and flushed to disk, or not at all.

    `first`: only where there is none yet, else FileExistsError and the other stays.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{_OWN}.tmp")
    try:
        with open(temporary, "wb") as raw:
            out = _Hashing(raw)
            yield out
            raw.flush()
            os.fsync(raw.fileno())
        if first:
            os.link(temporary, path)
            temporary.unlink()
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """`data` under `path`, whole and flushed, replacing what was there."""
    with replacing(path) as out:
        out.write(data)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """The folder and those above it, each flushed into its parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def publish(folder: Path, target: Path) -> bool:
    """Rename `folder` to `target` in one step; False when somebody else's non-empty `target` is
    there already.

    OutcomeUnknownError when the rename was done, but could not be flushed.
    """
    sync(folder)
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    try:
        sync(target.parent)
    except OSError as error:
        raise OutcomeUnknownError(
            str(target.name),
            f"it is visible, but may not survive a power loss: {error.strerror}",
            state="the version was renamed into place; older versions are intact.",
            next="quiver verify",
        ) from error
    return True


def sha256(path: Path) -> str:
    """The file's sha256 as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
