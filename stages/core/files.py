"""Files on this host: written whole or not at all, flushed, hashed; and errors of the disk.

A failed fsync is never retried on the same file: the error is raised, and the write is not
acknowledged.

Not of the spine: its functions do what `open` and `write` do, and survive a crash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from quiver.schemas.errors import SYSTEM_REASONS, CorruptError, QuiverError, ResourceError

_PROCESS = uuid.uuid4().hex[:8]  # unique to this process among all hosts that share the file system
MOST_BYTES = 8 * 1024 * 1024
"""Largest small file that is read whole: a manifest, a note, a tag, a template."""
_RUST_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")
TEMPORARY = re.compile(r"\.[0-9]+-[0-9a-f]{8}-[0-9a-f]{4}\.tmp$")
"""End of the name of a file that is being written, or that a killed process left."""


def not_a(key: str, kind: str, path: Path) -> CorruptError:
    """Build the error for a path that should be a file or a folder and is something else."""
    return CorruptError(key, f"is not a {kind}", next=f"move {path} away")


@contextlib.contextmanager
def storage_errors(name: object) -> Iterator[None]:
    """Turn an operating system error into a ResourceError about `name`.

    Covers a full disk, missing permissions, I/O errors and the like (`SYSTEM_REASONS`).
    """
    try:
        yield
    except QuiverError:
        raise
    except Exception as error:
        reason = SYSTEM_REASONS.get(error_number(error))
        if reason is None:
            raise
        file = getattr(error, "filename", None)
        raise ResourceError(
            str(name),
            f"{reason} ({os.path.basename(str(file))})" if file else reason,
            state="every version that was there is intact; finished shards are kept and taken up "
            "again.",
            next="make room or make the store writable, then run the same command again",
        ) from error


def error_number(error: Exception) -> int | None:
    """Return the operating system's number of an error, or None.

    Rust libraries, such as safetensors, raise no OSError and give the number only in their message.
    """
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERROR_NUMBER.search(str(error))
    return int(match[1]) if match else None


@contextlib.contextmanager
def replacing(path: Path, *, if_absent: bool = False, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write; it appears as `path` whole and flushed to disk, or not at all.

    With `if_absent`, raises FileExistsError if `path` exists, and leaves it unchanged. Unless
    `durable`, the file is not flushed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{_PROCESS}-{uuid.uuid4().hex[:4]}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if if_absent:
            # unlike a rename, a link fails if the name exists
            os.link(temporary, path)
            # the object is in place even if its temporary name stays
            with contextlib.suppress(OSError):
                temporary.unlink()
        elif path.is_dir():
            raise not_a(str(path), "file", path)
        else:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return all bytes of a small file that a user names.

    Raises OSError, or ValueError if it is not a regular file or has more than `most_bytes`.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        raise ValueError("is not a file")
    if status.st_size > most_bytes:
        raise ValueError(f"has {status.st_size:,} bytes, at most {most_bytes:,} are read")
    return path.read_bytes()


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, whole and flushed, replacing an existing file."""
    with replacing(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make the folder and its parents, each flushed into its parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise not_a(str(path), "folder", path) from None
    sync(path.parent)


def sha256_of(path: Path) -> str:
    """Return the file's sha256 as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular_file(path: Path, key: str) -> Path:
    """Return `path` if it is a regular file.

    Raises FileNotFoundError, or CorruptError about `key` for anything else, such as a folder, link
    or pipe.
    """
    try:
        is_file = stat.S_ISREG(path.lstat().st_mode)
    except NotADirectoryError:
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path)) from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        is_file = False
    if not is_file:
        raise not_a(key, "file", path)
    return path
