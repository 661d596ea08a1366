"""Storage: objects by key. This module keeps them in a folder of a POSIX file system.

Other modules name objects by key (`arith/rollouts/v000003/manifest.json`). They take a path only
from `local` and `folder`, for libraries that read or write files themselves.

An object is written once, and appears whole or not at all. `put` and `swap` are for the few that
may be replaced: leases, caches and notes of progress. `publish` makes a version visible in one
step. What is flushed to disk (fsync), unless `durable` is false:

    put_if_absent, put    the object's bytes; with `flush_name`, its name in the folder as well
    put_file              a file that a library wrote, and its name
    publish               all names of the version, its manifest, and the names of the folders above

Every change goes through the functions below and `core.files`, so a test can record the changes and
replay each state that a power loss may leave.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from pathlib import Path

import pyarrow as pa

from quiver.schemas.errors import CorruptError, OutcomeUnknownError
from quiver.schemas.fields import require_names
from quiver.stages.core.files import (
    MOST_BYTES,
    TEMPORARY,
    make_folder,
    not_a,
    replacing,
    sha256_of,
    storage_errors,
    sync,
)

_NUMBER = re.compile(r"[0-9]{6,12}")
_MOST_TRIES = 100
Stamp = tuple[int, int, int]
"""Changes with every write of an object."""


class Storage:
    """Objects by key below one folder. Missing objects raise FileNotFoundError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def url(self) -> str:
        """The folder, as `--store` names it."""
        return str(self._root)

    @property
    def is_foreign(self) -> bool:
        """True if another user owns store.json, and so presumably wrote the store."""
        return self.local("store.json").stat().st_uid != os.geteuid()

    # -- reading

    def local(self, key: str) -> Path:
        """Return the path of an object, or of the folder of a prefix, on this host. Nothing there
        may be changed."""
        return self._root / key

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

    def size_and_sha256(self, key: str) -> tuple[int, str]:
        """Return the object's size in bytes and its sha256, as 64 hex digits."""
        path = self._file(key)
        return path.stat().st_size, sha256_of(path)

    def stamp(self, key: str) -> Stamp | None:
        """Return the object's stamp, or None if there is no object."""
        try:
            status = self.local(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None
            raise
        # a restored copy has the old modification time, but not the old change time
        return status.st_mtime_ns, status.st_ctime_ns, status.st_ino

    def list(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`, sorted; empty if it does not exist.

        Objects being written are not listed, nor what a killed process left of one. Raises
        CorruptError if `prefix`, or a name above it, exists and is not a folder.
        """
        try:
            names = sorted(os.listdir(self.local(prefix)))
            # the search is slow for ten thousand names
            return [n for n in names if not (n.endswith(".tmp") and TEMPORARY.search(n))]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
        path = self.local(prefix)
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_dir():
            raise not_a(os.path.relpath(path, self._root), "folder", path)
        return []

    def list_numbers(self, prefix: str) -> list[int]:
        """Return the numbers of objects directly below `prefix` named like `000001`, rising."""
        names = (name.removesuffix(".json") for name in self.list(prefix))
        return sorted(int(name) for name in names if _NUMBER.fullmatch(name))

    def files(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every regular file below `prefix`, by its name from there,
        sorted. Files that vanish meanwhile are left out."""
        top = self.local(prefix)
        sizes = {}
        for folder, _, names in os.walk(top):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        sizes[path.relative_to(top).as_posix()] = status.st_size
        return dict(sorted(sizes.items()))

    def changed_at(self, prefix: str) -> float:
        """Return when an object below `prefix` was last written, in seconds since 1970; 0 if there
        is none."""
        newest = 0.0
        for folder, _, names in os.walk(self.local(prefix)):
            for path in (folder, *(os.path.join(folder, name) for name in names)):
                with contextlib.suppress(FileNotFoundError):
                    newest = max(newest, os.lstat(path).st_mtime)
        return newest

    def _file(self, key: str) -> Path:
        """Return the path of an object.

        Raises FileNotFoundError, or CorruptError for anything but a regular file, such as a folder,
        link or pipe, and if a folder on the way is a link.
        """
        path = self.local(key)
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

    def is_linked(self, key: str) -> bool:
        """Return True if a symbolic link in the path leads elsewhere."""
        try:
            return self.local(key).resolve() != self._root.resolve() / key
        except RuntimeError:  # pathlib raises this for a loop of links
            return True

    # -- writing

    def put_if_absent(
        self, key: str, data: bytes, *, flush_name: bool = False, durable: bool = True
    ) -> bool:
        """Write an object if it does not exist; return False if it does.

        Args:
            flush_name: flush its name too, so that it survives a power loss from now on.
            durable: if false, it need not survive a power loss.
        """
        path = self.local(key)
        for _ in range(_MOST_TRIES):
            # another process may just have deleted the folder
            with contextlib.suppress(FileNotFoundError):
                if flush_name:
                    make_folder(path.parent)
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with replacing(path, if_absent=True, durable=durable) as file:
                        file.write(data)
                except FileExistsError:
                    return False
                if flush_name:
                    sync(path.parent)
                return True
        raise FileNotFoundError(errno.ENOENT, "its folder cannot be made", str(path))

    def put(self, key: str, data: bytes, *, flush_name: bool = False, durable: bool = True) -> None:
        """Write an object, replacing an existing one. For `flush_name` and `durable`, see
        `put_if_absent`."""
        path = self.local(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():  # not ours
            self.delete(key)
        with replacing(path, durable=durable) as file:
            file.write(data)
        if flush_name:
            sync(path.parent)

    def swap(self, key: str, data: bytes, stamp: Stamp | None) -> Stamp | None:
        """Replace an object that still has this stamp. Returns its new stamp; None if the object
        changed, or is gone."""
        if stamp is None or self.stamp(key) != stamp:
            return None
        with contextlib.suppress(FileNotFoundError):
            with replacing(self.local(key), durable=False) as file:
                file.write(data)
            return self.stamp(key)
        return None

    def flush(self, prefix: str) -> None:
        """Flush the names directly below `prefix`, which other processes may just have made, so
        that what is built on them does not outlive them."""
        with storage_errors(prefix), contextlib.suppress(FileNotFoundError):
            sync(self.local(prefix))

    def folder(self, prefix: str) -> Path:
        """Return the folder of `prefix`, made if it does not exist, for a library that writes
        files. They become objects by `put_file`."""
        path = self.local(prefix)
        make_folder(path)
        return path

    def put_file(self, key: str) -> tuple[int, str]:
        """Make a file that a library wrote into `folder` an object: flushed, with its name, and
        readable for other users. Returns its size and sha256."""
        path = self.local(key)
        path.chmod(0o644)
        sync(path)
        sync(path.parent)
        return path.stat().st_size, sha256_of(path)

    def delete(self, key: str) -> None:
        """Delete an object, or all objects below a prefix, if it exists.

        The name of a folder is hidden by a rename first, so that no process writes into it any
        more.
        """
        path = self.local(key)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(path.lstat().st_mode):
                if not path.name.endswith(".gone"):
                    hidden = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.gone")
                    path = path.rename(hidden)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    # -- versions

    def publish(
        self, work: str, token: str, target: str, manifest: bytes, sizes: dict[str, int]
    ) -> bool:
        """Make the objects below `work`, with this manifest, visible as the version `target`.

        First the folder gets a name of its own (`work.token`), so no process writes into it any
        more, nor publishes it as well. Then its manifest is written and flushed, and it is renamed.

        Args:
            sizes: bytes of the files that it must have, by name.

        Returns:
            False if `target` is taken; the same call with another target goes on.

        Raises:
            FileNotFoundError: another process took the folder or its files away.
            OutcomeUnknownError: the version is visible, but could not be flushed.
        """
        closed, folder = self.local(f"{work}.{token}"), self.local(target)
        if not closed.is_dir():
            self.local(work).rename(closed)
        there = self.files(f"{work}.{token}")
        for name in there.keys() - sizes.keys():
            (closed / name).unlink(missing_ok=True)
        for name, size in sizes.items():
            if there.get(name) != size:
                self.reclaim(work, token)
                raise FileNotFoundError(errno.ENOENT, "it was taken away", str(closed / name))
        with replacing(closed / "manifest.json") as file:
            file.write(manifest)
        # a version that is visible after a power loss must be complete, and must stay visible: the
        # folders of its kind and run may be new
        for path in (*closed.rglob("*"), closed, folder.parents[1], self._root):
            if path.is_dir():
                sync(path)
        try:
            closed.rename(folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return False
            raise
        try:
            sync(folder.parent)
        except OSError as error:
            raise OutcomeUnknownError(
                folder.name,
                f"it is visible, but may not survive a power loss: {error.strerror}",
                state="the version was renamed into place; older versions are intact.",
                next="quiver verify",
            ) from error
        return True

    def reclaim(self, work: str, token: str = "[0-9a-f]{12}") -> None:
        """Take back what a process left that died, or sleeps, while it published `work`. From now
        on it cannot publish it any more.

        Args:
            token: take back only what has this token.
        """
        place, _, name = work.rpartition("/")
        for other in self.list(place):
            if re.fullmatch(rf"{re.escape(name)}\.{token}(\.gone)?", other):
                taken = self.local(f"{place}/{other.removesuffix('.gone')}.gone")
                # a second process that reclaims finds nothing to rename
                with contextlib.suppress(FileNotFoundError):
                    self.local(f"{place}/{other}").rename(taken)
                    self.local(work).mkdir(exist_ok=True)
                    for path in taken.iterdir():
                        path.rename(self.local(work) / path.name)
                    taken.rmdir()
