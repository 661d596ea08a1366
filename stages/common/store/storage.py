"""The one place that knows paths: objects by key in a folder of a POSIX file system.

Everything above names objects by key (`arith/rollouts/v000003/manifest.json`). What it needs of a
storage is little, so that an object store can stand in for the folder: read, write whole, put if
absent, list, delete, and publish, which makes a group of objects visible at once.

Every write goes through the functions below, so a test can record them and replay each state that a
power loss may leave. A failed fsync is never tried again on the same file: the error rises, and the
file is not acknowledged.
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

from .failpoints import check_failpoints, failpoint

_PROCESS = uuid.uuid4().hex[:8]  # tells this process from those of all hosts that see the file
MOST_BYTES = 8 * 1024 * 1024
"""Of an object that is read whole: a manifest, a note, a tag."""
_NUMBER = re.compile(r"[0-9]{6,12}")
_RUST_ERROR_NUMBER = re.compile(r"\(os error (\d+)\)")


class Storage:
    """Objects by key below one folder. FileNotFoundError where an object is not there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        check_failpoints()

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else wrote what is here, as far as store.json tells."""
        return self.path("store.json").stat().st_uid != os.geteuid()

    def path(self, key: str) -> Path:
        """Where the object lies on this host, for libraries that read files themselves."""
        return self.root / key

    def exists(self, key: str) -> bool:
        """Whether there is such an object, or one below this prefix."""
        return self.path(key).exists()

    def read(self, key: str, most_bytes: int = MOST_BYTES) -> bytes:
        """All bytes of a small object. CorruptError where it has more than `most_bytes`, or where
        something else than a file has its name."""
        path = self._file(key)
        size = path.stat().st_size
        if size > most_bytes:
            problem = f"has {size} bytes, at most {most_bytes} are read"
            raise CorruptError(key, problem, next=f"move {path} away")
        return path.read_bytes()

    def _file(self, key: str) -> Path:
        """The path of an object. FileNotFoundError; CorruptError: a folder, a loop, a pipe."""
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
        """An Arrow file, mapped into memory. pyarrow.ArrowException where it cannot be parsed."""
        file = pa.memory_map(str(self._file(key)))
        try:
            table = pa.ipc.open_file(file).read_all()
            require_names(table.schema)
            return table
        except OSError as error:
            if error.errno is None:  # pyarrow's word for a file that contradicts itself
                raise pa.ArrowInvalid(str(error)) from None
            raise

    def size(self, key: str) -> int:
        """Bytes of an object."""
        return self._file(key).stat().st_size

    def sha256(self, key: str) -> str:
        """The object's sha256 as 64 hex digits."""
        return sha256(self._file(key))

    def is_linked(self, key: str) -> bool:
        """Whether a symbolic link on the way leads somewhere else."""
        try:
            return self.path(key).resolve() != self.root.resolve() / key
        except RuntimeError:  # pathlib's word for a loop
            return True

    def list(self, prefix: str) -> list[str]:
        """Names directly below `prefix`, sorted; none where there is nothing. CorruptError where
        something else than a folder is there, or above it."""
        try:
            return sorted(os.listdir(self.path(prefix)))
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
        """The numbers that name objects directly below `prefix` as `000001` does, rising."""
        return [int(name) for name in self.list(prefix) if _NUMBER.fullmatch(name)]

    def list_files(self, prefix: str) -> list[str]:
        """Keys of all objects below `prefix`, relative to it, sorted."""
        folder = self.path(prefix)
        return sorted(
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        )

    def stats(self, prefix: str) -> Iterator[os.stat_result]:
        """Of what has this name and of all below it; what goes meanwhile is left out."""
        paths = [str(self.path(prefix))]
        for folder, folder_names, names in os.walk(paths[0]):
            paths += [os.path.join(folder, name) for name in (*folder_names, *names)]
        for path in paths:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                yield os.lstat(path)

    def create(
        self, key: str, *, if_absent: bool = False
    ) -> contextlib.AbstractContextManager[HashingFile]:
        """A file to write; the object appears whole and flushed, or not at all.

        `if_absent`: FileExistsError where there is one, which stays as it is.
        """
        return replacing(self.path(key), if_absent=if_absent)

    def write(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Write an object whole, in place of the one that was there.

        Not `durable`: it need not outlive a power loss, so it is not flushed.
        """
        with replacing(self.path(key), durable=durable) as file:
            file.write(data)

    def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """Write an object where there is none; False where there is one.

        Not `durable`: it need not outlive a power loss, so it is not flushed.
        """
        path = self.path(key)
        while True:
            with contextlib.suppress(FileNotFoundError):  # another has just deleted the folder
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
        """What changes with every write or renewal of the object, nanoseconds of the last
        modification first; None where there is none."""
        try:
            status = self.path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        # a copy that was put back has the old time of modification, but not of change
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino

    def renew(self, key: str) -> bool:
        """Change the object's stamp and nothing else; False where there is none."""
        try:
            os.utime(self.path(key))
        except FileNotFoundError:
            return False
        failpoint("renewed", self.path(key))
        return True

    def make_prefix(self, prefix: str, *, durable: bool = True) -> None:
        """Make the folder that objects below `prefix` need, flushed if it is to be `durable`; else
        the one above must be there."""
        if durable:
            make_folder(self.path(prefix))
        else:
            self.path(prefix).mkdir(exist_ok=True)

    def copy_into(self, key: str, target: str) -> None:
        """Let `target` be the same immutable object, without copying bytes where that is
        possible; its folder must be there."""
        try:
            os.link(self.path(key), self.path(target))
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            shutil.copyfile(self.path(key), self.path(target))  # a file system without links
            sync(self.path(target))
        failpoint("linked", self.path(target))

    def settle(self, key: str) -> None:
        """Flush a file that a library wrote; some write weights for their owner alone."""
        self.path(key).chmod(0o644)
        sync(self.path(key))

    def sync_names(self, prefix: str) -> None:
        """Flush which objects lie directly below `prefix`: what was written there outlives a power
        loss."""
        sync(self.path(prefix))

    def sync_folders(self, prefix: str) -> None:
        """Flush the folders below `prefix`, so that what was linked into them outlives a power
        loss."""
        for path in self.path(prefix).rglob("*"):
            if path.is_dir():
                sync(path)

    def delete(self, key: str) -> None:
        """Delete one object, if it is there, or the folder that has its name."""
        try:
            self.path(key).unlink(missing_ok=True)
        except (IsADirectoryError, PermissionError):  # what POSIX says of a folder
            self.delete_tree(key)

    def delete_tree(self, prefix: str) -> None:
        """Delete all objects below `prefix`, or the one of that name; hidden at once, so that
        nobody writes into it any more."""
        path = self.path(prefix)
        trash = path
        if not path.name.endswith(".gone"):
            trash = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.gone")
        with contextlib.suppress(FileNotFoundError):
            path.rename(trash)
        failpoint("hidden", path)
        if trash.is_dir():
            shutil.rmtree(trash, ignore_errors=True)
        else:
            trash.unlink(missing_ok=True)
        failpoint("deleted", path)

    def publish(self, prefix: str, target: str) -> bool:
        """Make all below `prefix` visible below `target` at once; False where `target` is taken."""
        return publish(self.path(prefix), self.path(target))


# -- files


def _not_a(key: str, kind: str, path: Path) -> CorruptError:
    return CorruptError(key, f"is not a {kind}", next=f"move {path} away")


@contextlib.contextmanager
def storage_errors(name: object) -> Iterator[None]:
    """Turn an operating system's error into ResourceError about `name`: full disk, read-only,
    input/output error."""
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
    """The system's number of an error. Libraries in Rust, such as safetensors, raise no OSError,
    but say it in their text."""
    if isinstance(error, OSError):
        return error.errno
    match = _RUST_ERROR_NUMBER.search(str(error))
    return int(match[1]) if match else None


class HashingFile:
    """A file that hashes and counts what is written to it."""

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
    """A file to write; it appears under `path` whole and flushed to disk, or not at all.

    `if_absent`: FileExistsError where there is one, which stays. Not `durable`: it is not flushed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{_PROCESS}-{uuid.uuid4().hex[:4]}.tmp")
    try:
        with open(temporary, "wb") as raw:
            file = HashingFile(raw)
            yield file
            raw.flush()
            if durable:
                failpoint("flushing", path)
                os.fsync(raw.fileno())
        if if_absent:
            os.link(temporary, path)
            with contextlib.suppress(OSError):  # it is there, whatever becomes of its other name
                temporary.unlink()
        elif path.is_dir():
            raise _not_a(str(path), "file", path)
        else:
            os.replace(temporary, path)
        failpoint("created" if if_absent else "replaced", path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_file(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a small file that a user names. OSError; ValueError: it is something else than a
    file, or has more than `most_bytes`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise ValueError("is not a file")
    if status.st_size > most_bytes:
        raise ValueError(f"has {status.st_size:,} bytes, at most {most_bytes:,} are read")
    return path.read_bytes()


def write_bytes(path: Path, data: bytes) -> None:
    """`data` under `path`, whole and flushed, replacing what was there."""
    with replacing(path) as file:
        file.write(data)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        failpoint("flushing", path)
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """The folder and those above it, each flushed into its parent."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _not_a(str(path), "folder", path) from None
    sync(path.parent)
    failpoint("made", path)


def publish(folder: Path, target: Path) -> bool:
    """Rename `folder` to `target` in one step; False when somebody else's non-empty `target` is
    there already.

    OutcomeUnknownError when the rename was done, but could not be flushed.
    """
    sync(folder)
    failpoint("renaming", target)
    try:
        os.rename(folder, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    try:
        failpoint("renamed", target)
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
