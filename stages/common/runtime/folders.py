"""Temporary folders that are removed when their process is done with them, or has died.

    with temporary_folder() as folder:      # $TMPDIR/quiver-01abcdef
        ...

Each holds a file that its process keeps locked. A process that was killed could remove nothing, but
the kernel let go of its lock: whoever starts next, on whatever host sees the folder, sweeps it.

Not of the spine: nothing that is kept lies in them.
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
    """A folder of this process's own, until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with open(folder / "new", "w") as lock:
            with suppress(OSError):  # a file system without locks: nobody sweeps it then
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(folder / "new", folder / _LOCK)  # nobody sees it without its lock
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_folders() -> None:
    """Remove the folders of this user's processes that have died."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        folder = path.parent
        # what goes away meanwhile was swept by another, and what is locked belongs to the living
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
                continue
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
