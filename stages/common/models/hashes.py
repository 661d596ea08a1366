"""Hashes of files outside the store, such as a model's weights; each user's cache remembers them.

    hash_files(sorted(folder.glob("*.safetensors")), remembered=True)

A hash is remembered by the file's path, size, mtime_ns, ctime_ns and inode, in one small JSON file.
A file that changed in the last two seconds may change again within the same tick of its clock: its
hash is neither remembered nor believed. A hash that goes into a new manifest is always computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.stages.common.store import storage

_SETTLED_NS = 2_000_000_000


def hash_files(paths: Iterable[Path], *, remembered: bool = False) -> list[tuple[str, str]]:
    """Name and sha256 (64 hex digits) of each file, in the same order.

    `remembered`: a hash from memory is enough where the file looks unchanged. Otherwise every byte
    is read, and the memory is set right.
    """
    with ThreadPoolExecutor(4) as pool:  # a large file is hashed at the speed of one core
        return list(pool.map(lambda path: (path.name, _hash_file(path, remembered)), paths))


def _hash_file(path: Path, remembered: bool) -> str:
    path = path.resolve()
    status = path.stat()
    identity = {
        "path": str(path),
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }
    is_settled = time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) >= _SETTLED_NS
    if remembered and is_settled:
        sha256 = _recall(identity)
        if sha256 is not None:
            return sha256
    sha256 = storage.sha256(path)
    if is_settled:
        _remember(identity, sha256)
    return sha256


def _recall(identity: dict[str, Any]) -> str | None:
    """The sha256 of the file that looked just like this; None where none is remembered."""
    with suppress(OSError, RuntimeError, ValueError, TypeError, KeyError):
        entry = json.loads(_entry_path(identity).read_bytes())
        if entry["identity"] == identity:
            return str(entry["sha256"])
    return None


def _remember(identity: dict[str, Any], sha256: str) -> None:
    with suppress(OSError, RuntimeError):  # no home, a full disk: then it is computed again
        path = _entry_path(identity)
        path.parent.mkdir(parents=True, exist_ok=True)
        with storage.replacing(path, durable=False) as file:
            file.write(json.dumps({"identity": identity, "sha256": sha256}).encode())


def _entry_path(identity: dict[str, Any]) -> Path:
    """Where the hash of a file is remembered. RuntimeError where the user has no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(identity["path"])).hexdigest()
    return Path(cache) / "quiver" / "hashes" / f"{name}.json"
