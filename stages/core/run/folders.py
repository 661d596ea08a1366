"""Temporary folders that are removed when their process ends, or by the next one after a crash.

    with temporary_folder() as folder:      # $TMPDIR/quiver-01abcdef
        ...

Each folder holds a file that its process keeps locked. A killed process cannot clean up, but the
kernel releases its lock, and the next process to start, on any host that sees the folder, removes
it.

Not of the spine: these folders hold no results.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "quiver-"
_LOCK = "lock"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder for this process alone and remove it at the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with open(folder / "new", "w") as lock:
            with suppress(OSError):  # a file system without locks: then the folder is never swept
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # the lock file appears only once it is locked
                os.rename(folder / "new", folder / _LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_folders() -> None:
    """Remove the folders of this user's processes that have died."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        folder = path.parent
        # errors are expected: another process swept the folder first, or a live process holds the
        # lock
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
