"""Disk space set aside, so that a store on a full disk can still be cleaned up.

    STORE/.reserve      random bytes; a process that deletes versions deletes this file first

Tombstones are written before versions are deleted, and that needs some blocks. A store without a
reserve, created on an almost full disk, deletes its indexes instead, which can be rebuilt.
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
"""Room for about thirty tombstones and the trash folders."""
_NAME = ".reserve"


def keep_reserve(storage: Storage) -> None:
    """Write the reserve, unless it exists or the disk is almost full."""
    with suppress(OSError):
        if storage.exists(_NAME) and storage.size(_NAME) == BYTES:
            return  # after a power loss the file may be shorter
        if shutil.disk_usage(storage.root).free > 4 * BYTES:
            # random bytes, since some file systems compress
            storage.write(_NAME, os.urandom(BYTES), durable=False)


@contextmanager
def reserve_for_deleting(store: Store) -> Iterator[None]:
    """Free the reserve while versions are deleted, and write it again afterwards."""
    storage = store.storage
    with suppress(OSError):  # a read-only store raises its own error later
        storage.delete(_NAME)
        if shutil.disk_usage(storage.root).free < BYTES:
            for run, kind in product(store.runs(), KINDS):
                storage.delete(f"{run}/{kind}/.index/versions")
    try:
        yield
    finally:
        keep_reserve(storage)
