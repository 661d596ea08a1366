"""Storage: objects by key in a folder of a POSIX file system. This module maps keys to paths.

Other modules name objects by key (`arith/rollouts/v000003/manifest.json`) and take a path only for
libraries that read or write files themselves. They need few operations, so an object store could
replace the folder: read, write whole, put if absent, link or copy, stamp and renew, list, delete,
and publish, which makes a group of objects visible at once.

What is flushed to disk (fsync), unless `durable` is false:

    sync            one file, or one folder: the names directly in it
    settle          one file that a library wrote; also makes it readable for other users
    sync_names      the folder of a prefix
    sync_folders    every folder below a prefix, but not the prefix itself and no files
    make_prefix     the parent of each folder that it makes; if not `durable`, it makes only one
    write, create   the object's bytes, but not its name in the folder
    put_if_absent   the object's bytes and its name
    publish         the folder's names before the rename, and its new name after it

Every write goes through the functions below, so a test can record the writes and replay each state
that a power loss may leave. A failed fsync is never retried on the same file: the error is raised,
and the write is not acknowledged.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from quiver.schemas.errors import (
    SYSTEM_REASONS,
    CorruptError,
    OutcomeUnknownError,
    QuiverError,
    ResourceError,
)
from quiver.schemas.fields import require_names

_PROCESS = uuid.uuid4().hex[:8]  # unique to this process among all hosts that share the file system
MOST_BYTES = 8 * 1024 * 1024
"""Largest object that is read whole: a manifest, a note, a tag."""
_NUMBER = re.compile(r"[0-9]{6,12}")
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9a-f]{8}-[0-9a-f]{4}\.tmp$")
_RUST_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


class Storage:
    """Objects by key below one folder. Missing objects raise FileNotFoundError."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def is_foreign(self) -> bool:
        """True if another user owns store.json, and so presumably wrote the store."""
        return self.path("store.json").stat().st_uid != os.geteuid()

    def path(self, key: str) -> Path:
        """Return the object's path on this host, for libraries that read files themselves."""
        return self.root / key

    def exists(self, key: str) -> bool:
        """Return True if this object exists, or any object below this prefix."""
        return self.path(key).exists()

    def read(self, key: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return all bytes of a small object.

        Raises CorruptError if it has more than `most_bytes` or is not a regular file.
        """
        path = self._file(key)
        size = path.stat().st_size
        if size > most_bytes:
            problem = f"has {size} bytes, at most {most_bytes} are read"
            raise CorruptError(key, problem, next=f"move {path} away")
        return path.read_bytes()

    def _file(self, key: str) -> Path:
        """Return the path of an object.

        Raises FileNotFoundError, or CorruptError for anything but a regular file, such as a folder,
        link or pipe.
        """
        path = self.path(key)
        try:
            is_file = stat.S_ISREG(path.lstat().st_mode)
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path)) from None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            is_file = False
        if not is_file:
            raise _not_a(key, "file", path)
        return path

    def read_table(self, key: str) -> pa.Table:
        """Read an Arrow file, mapped into memory.

        Raises pyarrow.ArrowException if it cannot be parsed.
        """
        file = pa.memory_map(str(self._file(key)))
        try:
            table = pa.ipc.open_file(file).read_all()
            require_names(table.schema)
            return table
        except OSError as error:
            if error.errno is None:  # pyarrow raises this for a file that contradicts itself
                raise pa.ArrowInvalid(str(error)) from None
            raise

    def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        return self._file(key).stat().st_size

    def sha256(self, key: str) -> str:
        """Return the object's sha256 as 64 hex digits."""
        return sha256(self._file(key))

    def is_linked(self, key: str) -> bool:
        """Return True if a symbolic link in the path leads elsewhere."""
        try:
            return self.path(key).resolve() != self.root.resolve() / key
        except RuntimeError:  # pathlib raises this for a loop of links
            return True

    def list(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, sorted; empty if it does not exist.

        Objects being written are not listed, nor what a killed process left of one. Raises
        CorruptError if `prefix`, or a name above it, exists and is not a folder.
        """
        try:
            names = os.listdir(self.path(prefix))
            return sorted(name for name in names if not _TEMPORARY.search(name))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
        path = self.path(prefix)
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_dir():
            raise _not_a(os.path.relpath(path, self.root), "folder", path)
        return []

    def list_numbers(self, prefix: str) -> list[int]:
        """Return the numbers of objects directly below `prefix` named like `000001`, rising."""
        return [int(name) for name in self.list(prefix) if _NUMBER.fullmatch(name)]

    def list_files(self, prefix: str) -> list[str]:
        """Return the keys of all objects below `prefix`, relative to it, sorted."""
        folder = self.path(prefix)
        return sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )

    def stats(self, prefix: str) -> Iterator[os.stat_result]:
        """Yield the status of `prefix` and everything below it. Files that vanish are skipped."""
        paths = [str(self.path(prefix))]
        for folder, folder_names, names in os.walk(paths[0]):
            paths += [os.path.join(folder, name) for name in (*folder_names, *names)]
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield os.lstat(path)

    def create(
        self, key: str, *, if_absent: bool = False
    ) -> contextlib.AbstractContextManager[HashingFile]:
        """Open a new file to write; the object appears whole and flushed, or not at all.

        With `if_absent`, raises FileExistsError if the object exists, and leaves it unchanged.
        """
        return replacing(self.path(key), if_absent=if_absent)

    def write(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Write an object whole, replacing an existing one.

        Unless `durable`, it need not survive a power loss and is not flushed.
        """
        with replacing(self.path(key), durable=durable) as file:
            file.write(data)

    def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """Write an object if it does not exist; return False if it does.

        Unless `durable`, it need not survive a power loss and is not flushed.
        """
        path = self.path(key)
        while True:
            # another process has just deleted the folder
            with contextlib.suppress(FileNotFoundError):
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with replacing(path, if_absent=True, durable=durable) as file:
                        file.write(data)
                except FileExistsError:
                    return False
                if durable:
                    sync(path.parent)
                return True

    def stamp(self, key: str) -> tuple[int, int, int] | None:
        """Return a value that changes with every write or renewal, or None if there is no object.

        Its first element is the modification time in nanoseconds.
        """
        try:
            status = self.path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        # a restored copy has the old modification time, but not the old change time
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino

    def renew(self, key: str) -> bool:
        """Change the object's stamp and nothing else; return False if it does not exist."""
        try:
            os.utime(self.path(key))
        except FileNotFoundError:
            return False
        return True

    def make_prefix(self, prefix: str, *, durable: bool = True) -> None:
        """Create the folder for objects below `prefix`.

        With `durable`, parents are created and flushed too; otherwise the parent must exist.
        """
        if durable:
            make_folder(self.path(prefix))
        else:
            self.path(prefix).mkdir(exist_ok=True)

    def copy_into(self, key: str, target: str) -> None:
        """Make `target` the same immutable object, by a hard link if possible, else by a copy.

        The folder of `target` must exist.
        """
        try:
            os.link(self.path(key), self.path(target))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            shutil.copyfile(self.path(key), self.path(target))  # a file system without links
            sync(self.path(target))

    def settle(self, key: str) -> None:
        """Flush a file that a library wrote, and make it readable for other users too."""
        self.path(key).chmod(0o644)
        sync(self.path(key))

    def sync_names(self, prefix: str) -> None:
        """Flush the names directly below `prefix`, so that they survive a power loss."""
        sync(self.path(prefix))

    def sync_folders(self, prefix: str) -> None:
        """Flush the folders below `prefix`, so that links in them survive a power loss."""
        for path in self.path(prefix).rglob("*"):
            if path.is_dir():
                sync(path)

    def delete(self, key: str) -> None:
        """Delete an object, or the folder of that name, if it exists."""
        try:
            self.path(key).unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):  # POSIX's errors for a folder
            self.delete_tree(key)

    def delete_tree(self, prefix: str) -> None:
        """Delete the object `prefix` and all objects below it.

        The name is hidden by a rename first, so that no process writes into it any more.
        """
        path = self.path(prefix)
        trash = path
        if not path.name.endswith(".gone"):
            trash = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.gone")
        with contextlib.suppress(FileNotFoundError):
            # one rename hides the whole tree at once; deleting file by file would not
            path.rename(trash)
        if trash.is_dir():
            shutil.rmtree(trash, ignore_errors=True)
        else:
            trash.unlink(missing_ok=True)

    def publish(self, prefix: str, target: str) -> bool:
        """Make everything below `prefix` visible as `target` at once.

        Returns False if `target` is taken.
        """
        return publish(self.path(prefix), self.path(target))


# -- files


def _not_a(key: str, kind: str, path: Path) -> CorruptError:
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


class HashingFile:
    """A file that hashes and counts the bytes written to it."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw = raw
        self.sha = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data) -> int:
        view = memoryview(data)
        self.sha.update(view)
        self.raw.write(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        self.raw.flush()


@contextlib.contextmanager
def replacing(
    path: Path, *, if_absent: bool = False, durable: bool = True
) -> Iterator[HashingFile]:
    """Open a file to write; it appears as `path` whole and flushed to disk, or not at all.

    With `if_absent`, raises FileExistsError if `path` exists, and leaves it unchanged. Unless
    `durable`, the file is not flushed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{_PROCESS}-{uuid.uuid4().hex[:4]}.tmp")
    try:
        with open(temporary, "wb") as raw:
            file = HashingFile(raw)
            yield file
            raw.flush()
            if durable:
                os.fsync(raw.fileno())
        if if_absent:
            # unlike a rename, a link fails if the name exists
            os.link(temporary, path)
            # the object is in place even if its temporary name stays
            with contextlib.suppress(OSError):
                temporary.unlink()
        elif path.is_dir():
            raise _not_a(str(path), "file", path)
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
        raise _not_a(str(path), "folder", path) from None
    sync(path.parent)


def publish(folder: Path, target: Path) -> bool:
    """Rename `folder` to `target` in one step; return False if `target` exists and is not empty.

    Raises OutcomeUnknownError if the rename was done but could not be flushed.
    """
    # a version that is visible after a power loss must be complete
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
    """Return the file's sha256 as 64 hex digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
