"""Objects in a folder of a POSIX file system. This module maps keys to paths.

What is flushed to disk (fsync), unless `durable` is false:

    put_if_absent, put    the object's bytes; with `flush_name`, its name in the folder as well
    flush                 the names in a folder
    put_file              a file that a library wrote, and its name
    publish               all names of the version, its manifest, and the names of the folders above

Every change goes through the functions below and `core.files`, so a test can record the changes and
replay each state that a power loss may leave.

Not of the spine: it does what `storage` says, on a disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from quiver.schemas.errors import ConfigError, CorruptError, OutcomeUnknownError
from quiver.stages.core.files import (
    MOST_BYTES,
    TEMPORARY,
    make_folder,
    not_a,
    regular_file,
    replacing,
    storage_errors,
    sync,
)
from quiver.stages.core.user_cache import hash_stored

from .storage import Stamp

_MOST_TRIES = 100


class Disk:
    """Objects by key below one folder; see `Storage`."""

    data_folder = ".work"

    def __init__(self, root: Path) -> None:
        self._root = root
        self.url = str(root)
        if root.exists() and not root.is_dir():
            raise ConfigError(
                f"store {root}", "is a file, not a folder", next="name a folder in --store"
            )

    @property
    def is_foreign(self) -> bool:
        return self.local("store.json").stat().st_uid != os.geteuid()

    # -- reading

    def local(self, key: str, names: Iterable[str] = (), *, again: bool = False) -> Path:
        return self._root / key

    def read(self, key: str, most_bytes: int = MOST_BYTES) -> bytes:
        self._require_no_link(key)
        path = regular_file(self.local(key), key)
        size = path.stat().st_size
        if size > most_bytes:
            problem = f"has {size} bytes, at most {most_bytes} are read"
            raise CorruptError(key, problem, next=f"move {path} away")
        return path.read_bytes()

    def list(self, prefix: str) -> list[str]:
        self._require_no_link(f"{prefix}/")
        path = self.local(prefix)
        try:
            names = sorted(os.listdir(path))
            # the search is slow for ten thousand names
            return [n for n in names if not (n.endswith(".tmp") and TEMPORARY.search(n))]
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise
        while not os.path.lexists(path):
            path = path.parent
        if not path.is_dir():
            raise not_a(os.path.relpath(path, self._root), "folder", path)
        return []

    def files(self, prefix: str) -> dict[str, tuple[int, float]]:
        self._require_no_link(f"{prefix}/")
        top = self.local(prefix)
        entries = {}
        for folder, _, names in os.walk(top):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    status = path.lstat()
                    if stat.S_ISREG(status.st_mode):
                        name = path.relative_to(top).as_posix()
                        entries[name] = status.st_size, status.st_mtime
        return dict(sorted(entries.items()))

    def _require_no_link(self, key: str) -> None:
        """Raise CorruptError if a folder on the way to an object is a link: it leads to what may be
        another store's."""
        path = str(self._root)
        for name in key.split("/")[:-1]:
            path = os.path.join(path, name)  # pathlib is slow for ten thousand manifests
            if os.path.islink(path):
                name = os.path.relpath(path, self._root)  # noqa: PLW2901
                raise CorruptError(name, "is a link", next=f"replace {path} by the folder itself")

    # -- writing

    def put_if_absent(
        self, key: str, data: bytes, *, flush_name: bool = False, durable: bool = True
    ) -> Stamp | None:
        path = self.local(key)
        for _ in range(_MOST_TRIES):
            # another process may just have deleted the folder, or the folder with the new object
            with contextlib.suppress(FileNotFoundError):
                if flush_name:
                    make_folder(path.parent)
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with replacing(path, if_absent=True, durable=durable) as file:
                        file.write(data)
                except FileExistsError:
                    return None
                if flush_name:
                    sync(path.parent)
                if stamp := self._stamp(key):
                    return stamp
        raise FileNotFoundError(errno.ENOENT, "its folder cannot be made", str(path))

    def put(
        self,
        key: str,
        data: bytes,
        stamp: Stamp | None = None,
        *,
        durable: bool = True,
    ) -> Stamp | None:
        path = self.local(key)
        if stamp is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():  # not ours
                self.delete(key)
        elif self._stamp(key) != stamp:
            return None
        try:
            with replacing(path, durable=durable) as file:
                file.write(data)
        except FileNotFoundError:
            if stamp is None:
                raise
            return None
        return self._stamp(key)

    def _stamp(self, key: str) -> Stamp | None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = self.local(key).stat()
            # a restored copy has the old modification time, but not the old change time
            return str(status.st_mtime_ns), str(status.st_ctime_ns), str(status.st_ino)
        return None

    def flush(self, prefix: str) -> None:
        with storage_errors(prefix), contextlib.suppress(FileNotFoundError):
            sync(self.local(prefix))

    def folder(self, prefix: str) -> Path:
        path = self.local(prefix)
        make_folder(path)
        return path

    def put_file(self, key: str, file: Path | None = None) -> tuple[int, str]:
        path = self.local(key)
        if file is not None:
            make_folder(path.parent)
            with file.open("rb") as source, replacing(path) as copy:
                shutil.copyfileobj(source, copy)
        path.chmod(0o644)
        sync(path)
        sync(path.parent)
        return path.stat().st_size, hash_stored(path, is_own=True)

    def delete(self, *keys: str) -> None:
        for path in map(self.local, keys):
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISDIR(path.lstat().st_mode):
                    path.unlink(missing_ok=True)
                    continue
                # hidden by a rename first, so that no process writes into it any more
                if not path.name.endswith(".gone"):
                    hidden = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.gone")
                    path = path.rename(hidden)  # noqa: PLW2901
                shutil.rmtree(path, ignore_errors=True)

    # -- versions

    def publish(
        self, work: str, worker: str, target: str, manifest: bytes, sizes: dict[str, int]
    ) -> bool:
        # with a name of its own, no other process writes into the folder or publishes it
        closed_key = work if work.endswith(f".{worker}") else f"{work}.{worker}"
        closed, folder = self.local(closed_key), self.local(target)
        if not closed.is_dir():
            self.local(work).rename(closed)
        there = self.files(closed_key)
        for name in there.keys() - sizes.keys():
            (closed / name).unlink(missing_ok=True)
        for name, size in sizes.items():
            if name not in there or there[name][0] != size:
                self._take_back(closed_key.removesuffix(f".{worker}"), worker)
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

    def reclaim(self, work: str) -> None:
        self._take_back(work, "[0-9a-f]{12}")

    def _take_back(self, work: str, worker: str) -> None:
        """Move the files of closed folders of `work` back. `worker` is a regular expression."""
        place, _, name = work.rpartition("/")
        for other in self.list(place):
            if re.fullmatch(rf"{re.escape(name)}\.{worker}(\.gone)?", other):
                taken = self.local(f"{place}/{other.removesuffix('.gone')}.gone")
                # a second process that reclaims finds nothing to rename
                with contextlib.suppress(FileNotFoundError):
                    self.local(f"{place}/{other}").rename(taken)
                    self.local(work).mkdir(exist_ok=True)
                    for path in taken.iterdir():
                        path.rename(self.local(work) / path.name)
                    taken.rmdir()
