"""The user's cache, `~/.cache/quiver`: what takes long to compute or make, kept for other stores.

    hash_files(sorted(folder.glob("*.safetensors")), remembered=True)
    fill(folder, "models", key, make)     # calls make(path) to write the files if not cached

A hash is remembered with the file's inode, size, mtime_ns and ctime_ns, in one small JSON file; a
rename changes none of them. A file that changed in the last two seconds may change again within one
tick of its clock, so its hash is neither remembered nor reused. Only the hash of a file that this
process has written is remembered at once. A hash for a new manifest is always computed. `Memory`
keeps other small answers about files by the same rule.

A folder appears in the cache complete, by a rename. If two processes make it at once, both succeed
and the later result is discarded. Copied files are checked against their hashes, and a damaged
folder is made anew. The cache only saves time: without a home or on a full disk, `make` writes into
the target folder itself.

Not of the spine: without the cache, all that it keeps is computed or made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.stages.core.files import replacing, sha256_of
from quiver.stages.core.threads import map_in_threads

_HASHES = "sha256.json"
_ABANDONED_SECONDS = 86_400
"""Age at which a temporary folder of a killed process is removed: one day."""
_SETTLED_NS = 2_000_000_000
_STORED_BYTES = 2**24
"""Size from which the hash of a store's file is remembered; smaller ones are hashed in no time."""
_MOST_HASHES = 2**14
"""Most files whose hash is remembered. Of two files in one slot, the later one is remembered."""
_LARGE = 2**30
"""Size in bytes from which reading a file takes seconds, so that a message is shown."""
shown = logging.getLogger("quiver")
"""Logger whose messages are shown during a run."""
log = logging.getLogger(__name__)


def cache_folder(kind: str) -> Path | None:
    """Return the folder of the user's cache for one kind of data; None if the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "quiver", kind)
    return folder if folder.is_absolute() else None  # without a home `~` is not expanded


class Memory:
    """What was computed from files, kept until one of them changes.

        memory = Memory("sources", key, files)    # before they are read
        content = memory.recall()                 # None if nothing is remembered
        memory.keep(content)                      # plain JSON

    A file that changes while it is read does not spoil the memory: the answer is kept for the file
    as it was before, and no file looks like that again.
    """

    def __init__(
        self,
        kind: str,
        key: str,
        paths: Sequence[Path],
        made_by: Any = None,
        *,
        is_own: bool = False,
    ) -> None:
        """Look at the files. Raises OSError if one does not exist.

        Args:
            kind: Folder of the cache.
            key: What is asked about the files, such as their path.
            paths: All files that decide the answer. If there are none, nothing is remembered.
            made_by: Software that decides the answer too, as plain JSON.
            is_own: This process has just written the files, and nobody else knows them yet.
        """
        newest = 0
        files = []
        for path in map(Path.resolve, paths):
            status = path.stat()
            times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
            newest = max(newest, *times.values())
            files.append({"size": status.st_size, "inode": status.st_ino, **times})
        self._identity = {"files": files, "made_by": made_by}
        cache = cache_folder(kind)
        self._entry: Path | None = None
        is_settled = is_own or time.time_ns() - newest >= _SETTLED_NS
        if cache is not None and files and is_settled:
            self._entry = cache / f"{hashlib.sha256(os.fsencode(key)).hexdigest()}.json"

    def recall(self) -> Any:
        """Return what was kept for these files as they are now, or None."""
        if self._entry is not None:
            with suppress(OSError, ValueError, TypeError, KeyError):
                entry = json.loads(self._entry.read_bytes())
                if entry["identity"] == self._identity:
                    return entry["content"]
        return None

    def keep(self, content: Any) -> None:
        """Remember `content` for these files, in place of what was kept before."""
        if self._entry is None:
            return
        entry = {"identity": self._identity, "content": content}
        with suppress(OSError):  # disk full or not writable: it is computed again next time
            self._entry.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._entry, durable=False) as file:
                file.write(json.dumps(entry).encode())


def hash_files(paths: Iterable[Path], *, remembered: bool = False) -> list[tuple[str, str]]:
    """Return name and sha256 (64 hex digits) of each file, in the same order.

    Args:
        paths: Files to hash, in threads.
        remembered: If true, a remembered hash is used if the file looks unchanged. If false, every
            byte is read and the memory is corrected.
    """
    return map_in_threads(lambda path: (path.name, _hash_file(path, remembered)), paths)


def hash_stored(path: Path, *, is_own: bool = False) -> str:
    """Return the sha256 of a file of a store: the remembered one if it looks unchanged, unless
    `is_own`, which means that this process has just written it."""
    if path.stat().st_size < _STORED_BYTES:
        return sha256_of(path)
    return _hash_file(path, not is_own, is_own)


def _hash_file(path: Path, remembered: bool, is_own: bool = False) -> str:
    path = path.resolve()
    slot = path.stat().st_ino % _MOST_HASHES
    memory = Memory("hashes", str(slot), [path], is_own=is_own)
    sha256 = memory.recall() if remembered else None
    if sha256 is None:
        size = path.stat().st_size
        if remembered and size >= _LARGE:
            shown.info("reading %s (%.1f GB) for its hash", path.name, size / 1e9)
        sha256 = sha256_of(path)
        memory.keep(sha256)
    return sha256


def fill(folder: Path, kind: str, key: str, make: Callable[[Path], None]) -> None:
    """Put the files that `make` writes into `folder`, from the cache if possible.

    The files must depend on `key` alone. Raises the errors of `make`.
    """
    cache = cache_folder(kind)
    if cache is None:
        make(folder)
        return
    kept = cache / key
    if _copy(kept, folder):
        return
    try:
        _keep(kept, make)
    except OSError as error:
        log.info("%s is not kept in the cache: %s", kind, error)
    if not _copy(kept, folder):
        make(folder)


def _copy(kept: Path, folder: Path) -> bool:
    """Copy the files of `kept` and return True.

    Returns False and copies nothing if `kept` does not exist or is damaged; a damaged folder is
    removed.
    """
    if not (kept / _HASHES).is_file():
        return False
    names: list[str] = []
    with suppress(OSError, ValueError, TypeError):
        hashes = dict(json.loads((kept / _HASHES).read_bytes()))
        names = list(hashes)
        for name in names:
            shutil.copyfile(kept / name, folder / name)
        if dict(hash_files(folder / name for name in names)) == hashes:
            return True
    log.info("%s in the cache is damaged, and is made again", kept.name)
    shutil.rmtree(kept, ignore_errors=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return False


def _keep(kept: Path, make: Callable[[Path], None]) -> None:
    """Make the folder `kept`, unless another process makes it first."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    for left in kept.parent.glob("*.tmp"):  # remains of killed processes
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=f"{kept.name}-", suffix=".tmp", dir=kept.parent))
    try:
        make(work)
        hashes = dict(hash_files(sorted(work.iterdir())))
        (work / _HASHES).write_text(json.dumps(hashes))
        if not (kept / _HASHES).is_file():
            shutil.rmtree(kept, ignore_errors=True)  # unusable without its hashes
        with suppress(OSError):  # another process made `kept` first
            os.rename(work, kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)
