"""The trash: versions taken out of the store but not deleted yet, and the lease for doing so.

    STORE/.trash/1764000000-12-5f0c21ab-86400/    taken by the twelfth process, and when
        arith/rollouts/v000003                    a version
        arith/policy/v000003.optimizer            a folder of a version's files
    STORE/.trash/1764000060-13-….open/            of the process that holds the lease now
    STORE/.leases/gc/000013                       its lease

A folder's name holds two times: the clock, and the seconds since the host booted. Until the next
boot the second one gives the age, since a clock may jump.

A version is moved to the trash by one rename, after its tombstone is in the ledger. It can be moved
back until it is deleted. One process at a time may do either. If a process slept while another took
over, its folder was renamed, so it cannot take anything any more.

    with open_trash(storage) as trash:
        trash.take(ref)
    rescue(storage, ref)        # keep a version in use that is about to be deleted, or just was

Not of the spine: a run reads from the trash only to restore files that expired.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from quiver.schemas.errors import BusyError, LineageError, printable
from quiver.schemas.refs import Ref

from .leases import Lease, Leases, Owner
from .ledger import Ledger, Tombstone
from .storage import Storage, storage_errors

WAIT_SECONDS = 10.0
"""Seconds that a process waits for another one that takes versions away or back."""
FOLDER = ".trash"
LEASES = ".leases"
_LEASE = "gc"
_OPEN = ".open"
_NAME = re.compile(rf"([0-9]+)-([0-9]+)-([0-9a-f]{{8}})-([0-9]+)(?:\{_OPEN})?")
_HALF_DELETED = re.compile(r".+\.[0-9a-f]{8}\.gone")


class Trash:
    """Moves versions into the trash, or back, while this process holds the lease."""

    def __init__(self, storage: Storage, lease: Lease) -> None:
        self._storage = storage
        self._lease = lease
        boot, seconds = _running()
        self.folder = f"{FOLDER}/{int(time.time())}-{lease.number}-{boot}-{int(seconds)}"
        """Folder of this process in the trash, once it has finished."""

    def take(self, ref: Ref, folder: str = "") -> bool:
        """Move the version, or a folder of its files, into the trash in one step.

        Returns False if it does not exist any more. Raises BusyError if another process took over.
        """
        source = f"{ref.folder}/{folder}" if folder else ref.folder
        target = f"{self.folder}{_OPEN}/{_place(ref, folder)}"
        with storage_errors(ref):
            self._storage.make_prefix(target.rpartition("/")[0])
            try:
                if self._lease.is_held() and self._storage.publish(source, target):
                    # without this it may come back half deleted after a power loss
                    self._storage.sync_names(source.rpartition("/")[0])
                    return True
            except FileNotFoundError:
                if not self._storage.exists(source):
                    return False
        raise _busy(str(ref), "another process took over while this one was not heard of")

    def put_back(self, ref: Ref, folder: str = "") -> bool:
        """Move the version, or a folder of its files, back and delete its tombstone.

        Returns False if it is deleted already.
        """
        target = f"{ref.folder}/{folder}" if folder else ref.folder
        with storage_errors(ref):
            if folder and not self._storage.exists(ref.folder):
                return False
            if not self._storage.exists(target):
                places = places_of(self._storage, ref, folder)
                try:
                    if not places or not self._storage.publish(places[-1], target):
                        return False
                except FileNotFoundError:  # it was deleted for good just now
                    return False
            Ledger(self._storage, ref.run, ref.kind).take_back(ref.version, folder)
        return True

    def close(self) -> None:
        """Close this process's folder. Its contents wait to be deleted."""
        if self._storage.exists(f"{self.folder}{_OPEN}"):
            self._storage.publish(f"{self.folder}{_OPEN}", self.folder)


@contextmanager
def open_trash(storage: Storage) -> Iterator[Trash]:
    """Hold the lease to take versions away or back. Raises BusyError if another process has it."""
    leases = Leases(storage, LEASES, "gc")
    deadline = time.monotonic() + WAIT_SECONDS
    with storage_errors("trash"):
        while (lease := leases.take_when_stale(_LEASE)) is None:
            if time.monotonic() > deadline:
                holder = leases.holder(_LEASE)
                process = f"process {holder.owner.pid}" if holder else "another process"
                raise _busy("trash", f"{process} takes versions away just now")
            time.sleep(0.1)
    trash = Trash(storage, lease)
    try:
        with storage_errors("trash"):
            for name in storage.list(FOLDER):  # folders of processes that died or slept
                if name.endswith(_OPEN):
                    storage.publish(f"{FOLDER}/{name}", f"{FOLDER}/{name.removesuffix(_OPEN)}")
            leases.trim(lease)
        yield trash
    finally:
        try:
            with storage_errors("trash"):
                trash.close()
        finally:
            lease.release()


def rescue(storage: Storage, ref: Ref) -> None:
    """Keep or restore a version that is about to be deleted, because it came into use.

    Call after a tag points at it or a stage announced that it reads it. Does nothing if the version
    has no tombstone or is deleted for good. Raises BusyError.
    """
    if Ledger(storage, ref.run, ref.kind).has_tombstone(ref.version):
        with open_trash(storage) as trash:
            trash.put_back(ref)


def places_of(storage: Storage, ref: Ref, folder: str = "") -> list[str]:
    """Return where the version, or a folder of its files, is in the trash, the newest last."""
    matches = filter(None, map(_NAME.fullmatch, storage.list(FOLDER)))
    oldest_first = sorted(matches, key=lambda match: (int(match[1]), int(match[2])))
    keys = [f"{FOLDER}/{match[0]}/{_place(ref, folder)}" for match in oldest_first]
    return [key for key in keys if storage.exists(key)]


def contents(storage: Storage, runs: Collection[str] | None = None) -> list[tuple[str, float]]:
    """List the trash: keys, each for one run that one process took from, and ages in seconds.

    Args:
        runs: runs to list. None: all.

    Half-deleted folders have an infinite age.
    """
    entries = []
    for name in storage.list(FOLDER):
        if name.endswith(_OPEN):
            continue
        match = _NAME.fullmatch(name)
        taken_from = storage.list(f"{FOLDER}/{name}")
        if _HALF_DELETED.fullmatch(name) or (match and not taken_from):
            entries.append((f"{FOLDER}/{name}", float("inf")))
        elif match:
            for run in taken_from:
                if _HALF_DELETED.fullmatch(run):
                    entries.append((f"{FOLDER}/{name}/{run}", float("inf")))
                elif runs is None or run in runs:
                    boot, seconds = _running()
                    is_same = match[3] == boot
                    age = seconds - int(match[4]) if is_same else time.time() - int(match[1])
                    entries.append((f"{FOLDER}/{name}/{run}", age))
    return entries


def delete(storage: Storage, key: str) -> None:
    """Delete for good one key returned by `contents`."""
    folder = key.rpartition("/")[0]
    with storage_errors(key):
        storage.delete_tree(key)
        if folder != FOLDER and not storage.list(folder):
            storage.delete_tree(folder)


def _running() -> tuple[str, float]:
    """Return the first digits of the host's boot id, and the seconds since it booted."""
    return Owner.this_process().boot_id[:8], time.clock_gettime(time.CLOCK_BOOTTIME)


def _place(ref: Ref, folder: str) -> str:
    return f"{ref.folder}.{folder}" if folder else ref.folder


def _busy(name: str, message: str) -> BusyError:
    return BusyError(name, message, next="wait for it, then run the same command again")


def expired_error(
    storage: Storage, ref: Ref, tombstone: Tombstone, folder: str = ""
) -> LineageError:
    """Build the error for reading expired files."""
    is_in_trash = bool(places_of(storage, ref, folder))
    where = "still lie in the trash" if is_in_trash else "are deleted"
    return LineageError(
        str(ref),
        f"its {f'files in {folder}/' if folder else 'files'} expired and {where}: "
        f"{printable(tombstone)}",
        state="its manifest is kept; nothing was changed.",
        next=f"quiver gc --restore {ref}" if is_in_trash else f"quiver lineage {ref}",
    )


def gone_error(storage: Storage, ref: Ref) -> LineageError | None:
    """Build the error for a version that was deleted after it was opened.

    Returns None if it was not deleted, so a missing file means damage. Raises CorruptError.
    """
    tombstone = Ledger(storage, ref.run, ref.kind).tombstone(ref.version)
    if tombstone is None or storage.exists(ref.folder):
        return None
    if tombstone.expired:
        return expired_error(storage, ref, tombstone)
    return LineageError(str(ref), f"was deleted on purpose: {tombstone}", next="quiver ls")
