"""Hashes of files outside the store, such as a model's weights, remembered in the user's cache.

    hash_files(sorted(folder.glob("*.safetensors")), remembered=True)

A hash is remembered under the file's path, size, mtime_ns, ctime_ns and inode, in one small JSON
file. A file that changed in the last two seconds may change again within one tick of its clock, so
its hash is neither remembered nor reused. A hash for a new manifest is always computed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from quiver.stages.common.store import storage
from quiver.stages.common.threads import map_in_threads

_SETTLED_NS = 2_000_000_000
_LARGE = 2**30
"""Size in bytes from which reading a file takes seconds, so that a message is shown."""
told = logging.getLogger("quiver")
"""Logger whose messages are shown during a run."""


def cache_folder(kind: str) -> Path | None:
    """Return the folder of the user's cache for one kind of data; None if the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "quiver", kind)
    return folder if folder.is_absolute() else None  # without a home `~` is not expanded


def hash_files(paths: Iterable[Path], *, remembered: bool = False) -> list[tuple[str, str]]:
    """Return name and sha256 (64 hex digits) of each file, in the same order.

    Args:
        paths: Files to hash, in threads.
        remembered: If true, a remembered hash is used if the file looks unchanged. If false, every
            byte is read and the memory is corrected.
    """
    return map_in_threads(lambda path: (path.name, _hash_file(path, remembered)), paths)


def _hash_file(path: Path, remembered: bool) -> str:
    path = path.resolve()
    status = path.stat()
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    identity = {"path": str(path), "size": status.st_size, "inode": status.st_ino, **times}
    entry_name = hashlib.sha256(bytes(path)).hexdigest()
    cache = cache_folder("hashes")
    is_settled = time.time_ns() - max(times.values()) >= _SETTLED_NS
    has_memory = cache is not None and is_settled
    entry_path = Path(cache or "", f"{entry_name}.json")
    if remembered and has_memory:
        with suppress(OSError, ValueError, TypeError, KeyError):
            entry = json.loads(entry_path.read_bytes())
            if entry["identity"] == identity:
                return entry["sha256"]
    if remembered and status.st_size >= _LARGE:
        told.info("reading %s (%.1f GB) for its hash", path.name, status.st_size / 1e9)
    sha256 = storage.sha256(path)
    if has_memory:
        with suppress(OSError):  # disk full or not writable: the hash is computed again next time
            entry_path.parent.mkdir(parents=True, exist_ok=True)
            with storage.replacing(entry_path, durable=False) as file:
                file.write(json.dumps({"identity": identity, "sha256": sha256}).encode())
    return sha256
