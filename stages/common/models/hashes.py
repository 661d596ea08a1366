"""Hashes of files outside the store, such as a model's weights; each user's cache remembers them.

    hash_files(sorted(folder.glob("*.safetensors")), remembered=True)

A hash is remembered by the file's path, size, mtime_ns, ctime_ns and inode, in one small JSON file.
A file that changed in the last two seconds may change again within the same tick of its clock: its
hash is neither remembered nor believed. A hash that goes into a new manifest is always computed.
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
"""Bytes of a file that takes seconds to read: somebody waits for them."""
told = logging.getLogger("quiver")
"""What whoever runs a recipe reads."""


def cache_folder(kind: str) -> Path | None:
    """The folder of this user's cache for one kind of thing; None where the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(cache, "quiver", kind)
    return folder if folder.is_absolute() else None  # `~` stays where there is no home


def hash_files(paths: Iterable[Path], *, remembered: bool = False) -> list[tuple[str, str]]:
    """Name and sha256 (64 hex digits) of each file, in the same order.

    `remembered`: a hash from memory is enough where the file looks unchanged. Otherwise every byte
    is read, and the memory is set right.
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
        with suppress(OSError):  # a full disk, a folder that is not ours: it is computed again
            entry_path.parent.mkdir(parents=True, exist_ok=True)
            with storage.replacing(entry_path, durable=False) as file:
                file.write(json.dumps({"identity": identity, "sha256": sha256}).encode())
    return sha256
