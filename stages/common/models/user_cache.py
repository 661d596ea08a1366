"""The user's cache, `~/.cache/quiver`: folders that take long to make, kept for the next store.

    fill(folder, "models", key, make)     # make(path) writes the files, if no call did so before

A folder appears in the cache whole, by a rename: if two processes make it at once, both succeed and
the later one's is thrown away. The copies of its files are checked against their hashes, so that a
damaged cache is made anew. The cache saves time and nothing else: without a home or with a full
disk `make` writes into the folder itself.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from quiver.stages.common.models.hashes import cache_folder, hash_files

_HASHES = "sha256.json"
_ABANDONED_SECONDS = 86_400
"""A folder that a process was killed over is removed after a day."""
log = logging.getLogger(__name__)


def fill(folder: Path, kind: str, key: str, make: Callable[[Path], None]) -> None:
    """Put the files into `folder` that `make` writes, which depend on `key` alone. Raises what
    `make` raises."""
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
    """Copy the files of `kept`; False, and nothing is copied, if it is not there or damaged. What
    is damaged is removed."""
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
    log.info("%s in the cache is damaged, and is made anew", kept.name)
    shutil.rmtree(kept, ignore_errors=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    return False


def _keep(kept: Path, make: Callable[[Path], None]) -> None:
    """Make the folder `kept`, unless another process does so first."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    for left in kept.parent.glob("*.tmp"):  # of processes that were killed
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left)
    work = Path(tempfile.mkdtemp(prefix=f"{kept.name}-", suffix=".tmp", dir=kept.parent))
    try:
        make(work)
        hashes = dict(hash_files(sorted(work.iterdir())))
        (work / _HASHES).write_text(json.dumps(hashes))
        if not (kept / _HASHES).is_file():
            shutil.rmtree(kept, ignore_errors=True)  # without its hashes it is of no use
        with suppress(OSError):  # it is there: another process was faster
            os.rename(work, kept)
    finally:
        shutil.rmtree(work, ignore_errors=True)
