"""The user's cache, `~/.cache/quiver`: folders that take long to make, kept for other stores.

    fill(folder, "models", key, make)     # calls make(path) to write the files if not cached

A folder appears in the cache complete, by a rename. If two processes make it at once, both succeed
and the later result is discarded. Copied files are checked against their hashes, and a damaged
folder is made anew. The cache only saves time: without a home or on a full disk, `make` writes into
the target folder itself.
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
"""Age at which a temporary folder of a killed process is removed: one day."""
log = logging.getLogger(__name__)


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
    log.info("%s in the cache is damaged, and is made anew", kept.name)
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
