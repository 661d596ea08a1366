"""Room that is set aside, so that a store on a full disk can still be cleaned up.

    STORE/.reserve      of no meaning; whoever deletes something deletes it first

What is taken away is written down before it goes, which needs some blocks. A store that was made
on a disk that was all but full has no reserve: its indexes go instead, which are made anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import product

from quiver.schemas.refs import KINDS

from .storage import Storage
from .versions import Store

BYTES = 256 * 1024
"""For some thirty tombstones, and the folders of the trash."""
_NAME = ".reserve"


def keep_reserve(storage: Storage) -> None:
    """Set room aside, unless it is, or the disk is all but full."""
    with suppress(OSError):
        if storage.exists(_NAME) and storage.size(_NAME) == BYTES:
            return  # one that a power loss left is shorter
        if shutil.disk_usage(storage.root).free > 4 * BYTES:
            # of random bytes, since some file systems compress
            storage.write(_NAME, os.urandom(BYTES), durable=False)


@contextmanager
def reserve_for_deleting(store: Store) -> Iterator[None]:
    """Use what is set aside while things are deleted, and set it aside again."""
    storage = store.storage
    with suppress(OSError):  # a store that cannot be written says so itself
        storage.delete(_NAME)
        if shutil.disk_usage(storage.root).free < BYTES:
            for run, kind in product(store.runs(), KINDS):
                storage.delete(f"{run}/{kind}/.index/versions")
    try:
        yield
    finally:
        keep_reserve(storage)
