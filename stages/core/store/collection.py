"""`quiver gc`: move old versions and optimizer state to the trash, and empty the trash.

    rule = Rule(keep=2, moments=1, grace_seconds=86400)
    collect(store, rule)                 # only reports
    collect(store, rule, apply=True)     # deletes

Trash older than the grace period and abandoned staging folders are deleted too. `retention` decides
which versions are kept; if it cannot decide, nothing is deleted. A collection may be killed at any
point: the next one finishes or undoes its half-done steps.
"""

from __future__ import annotations

import errno
import re
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import product

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import KINDS, Ref

from . import trash
from .leases import SECONDS_TO_LIVE, Leases
from .ledger import OPTIMIZER_FOLDER, Ledger
from .reserve import reserve_for_deleting
from .retention import QUARANTINE, Kept, find_kept, folders_of
from .storage import Storage, storage_errors
from .versions import Store, Version

_PLANNED_WITH = ("config.json", "generation_config.json")
"""Files of a policy that plans read beside its manifest; the tombstone keeps their text."""
_RUN_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Rule:
    """Which versions to keep, and for how long an expired one can be restored."""

    keep: int | None = None
    """Versions to keep per kind and run. None: all."""
    moments: int | None = 1
    """Policies per run that keep their optimizer state. None: all."""
    grace_seconds: float = 24 * 3600
    """Seconds that a version stays in the trash, and that abandoned staged work stays resumable."""
    runs: Collection[str] | None = None
    """Runs to clean. None: all. Versions of every run still count as users of others."""
    spared: tuple[str, ...] = ()
    """Versions that are kept as if a tag named them."""

    def runs_of(self, store: Store) -> Collection[str]:
        """Return the names of the runs to clean."""
        return store.runs() if self.runs is None else self.runs

    def why(self, folder: str) -> str:
        """Return the reason for the tombstone of a version, or of its `folder`."""
        return f"gc, moments = {self.moments}" if folder else f"gc, keep = {self.keep}"


@dataclass(frozen=True)
class Candidate:
    """A version to delete, or the folder with its optimizer state."""

    ref: Ref
    folder: str
    """Empty for the whole version."""
    bytes: int
    manifest: Manifest
    deleted_why: str | None
    """The reason given to `quiver rm`, if it was killed midway; None otherwise."""
    files: dict[str, str]
    """Texts of small files that the tombstone keeps, by name."""


@dataclass(frozen=True)
class Leftover:
    """The abandoned staging folders of one run key."""

    run: str
    run_key: str
    keys: list[str]
    bytes: int


@dataclass
class Collected:
    """Result of a collection: the deletions, done or planned, and bytes in trash and quarantine."""

    versions: list[Candidate] = field(default_factory=list)
    optimizer: list[Candidate] = field(default_factory=list)
    staging: list[Leftover] = field(default_factory=list)
    deleted_bytes: int = 0
    """Bytes deleted from the trash."""
    trash_bytes: int = 0
    """Bytes in the trash, including what this collection moved there."""
    quarantine: dict[str, int] = field(default_factory=dict)
    """Bytes per quarantined folder. A user has to delete these."""


def collect(store: Store, rule: Rule, *, apply: bool = False) -> Collected:
    """Clean up the store by `rule`, or, unless `apply`, only report what would be deleted.

    Raises:
        CorruptError: a tag, or the manifest of a version to keep, cannot be read; or one of the
            store's folders is not a folder.
        BusyError: another process is taking versions away.
    """
    storage = store.storage
    for key in folders_of(store):
        storage.list(key)
    kept = find_kept(store, rule.keep, rule.moments, rule.spared)
    places = [trash.places_of(storage, ref) for ref in kept.in_use if not store.exists(ref)]
    needed = tuple(place for of_one in places for place in of_one)
    old = []
    young = []
    for key, seconds in trash.contents(storage, rule.runs):
        is_old = seconds >= rule.grace_seconds
        is_needed = any(place.startswith(f"{key}/") for place in needed)
        (old if is_old and not is_needed else young).append(key)
    leftovers = list(leftovers_of(store, rule))
    collected = Collected(
        deleted_bytes=sum(size(storage, key) for key in old),
        trash_bytes=sum(size(storage, key) for key in young),
        quarantine={
            name: size(storage, f"{QUARANTINE}/{name}") for name in storage.list(QUARANTINE)
        },
    )
    if apply:
        for key in old:  # first, since it needs no room
            trash.delete(storage, key)
        with reserve_for_deleting(store):
            leftovers = [leftover for leftover in leftovers if _sweep(storage, leftover)]
            with trash.open_trash(storage) as turn:
                candidates = _take(store, rule, turn)
    else:
        candidates = _candidates(store, rule, kept)
    collected.versions = [candidate for candidate in candidates if not candidate.folder]
    collected.optimizer = [candidate for candidate in candidates if candidate.folder]
    collected.staging = leftovers
    collected.trash_bytes += sum(candidate.bytes for candidate in candidates)
    return collected


def size(storage: Storage, prefix: str) -> int:
    """Return the total bytes of the files below `prefix`, or of the file with this name."""
    return sum(entry.st_size for entry in storage.stats(prefix) if stat.S_ISREG(entry.st_mode))


# -- versions


def _candidates(store: Store, rule: Rule, kept: Kept) -> list[Candidate]:
    """Return the versions and optimizer folders to delete at this moment."""
    candidates = []
    for run, kind in product(rule.runs_of(store), KINDS):
        ledger = store.ledger(run, kind)
        tombstones = ledger.tombstones()
        for number in store.numbers(run, kind):
            ref = Ref(run, kind, number)
            with suppress(CorruptError):  # damaged versions stay; `verify` reports them
                version = store.version(ref)
                why = _deleted_why(ledger, version) if (number, "") in tombstones else None
                folder = ""
                if ref in (kept.versions if why is None else kept.in_use):
                    folder = OPTIMIZER_FOLDER
                    if ref in kept.optimizer or not store.storage.exists(f"{ref.folder}/{folder}"):
                        continue
                if version.manifest.run_key not in kept.run_keys:
                    candidates.append(_candidate(version, folder, why))
    return candidates


def _deleted_why(ledger: Ledger, version: Version) -> str | None:
    """Return the reason given to `quiver rm` for exactly this version, or None."""
    tombstone = ledger.tombstone(version.ref.version)
    is_meant = tombstone is not None and tombstone.commit_id == version.manifest.commit_id
    return tombstone.why if is_meant and not tombstone.expired else None


def _candidate(version: Version, folder: str, deleted_why: str | None) -> Candidate:
    """Build the candidate. Raises CorruptError if a file that the tombstone keeps is damaged."""
    names = [] if folder else [name for name in _PLANNED_WITH if name in version.files.names]
    entries = [
        entry
        for entry in version.manifest.files
        if entry.name.startswith(f"{folder}/" if folder else "")
    ]
    return Candidate(
        ref=version.ref,
        folder=folder,
        bytes=sum(entry.bytes for entry in entries if version.tombstone_of(entry.name) is None),
        manifest=version.manifest,
        deleted_why=deleted_why,
        files={name: version.files.read(name).decode(errors="replace") for name in names},
    )


def _take(store: Store, rule: Rule, turn: trash.Trash) -> list[Candidate]:
    """Move the candidates into the trash and return those that were moved.

    Tombstones are written first. Then the candidates are computed again, because a process may have
    begun to use one meanwhile, and only those still unused are moved.
    """
    kept = find_kept(store, rule.keep, rule.moments, rule.spared)
    candidates = _candidates(store, rule, kept)
    taken = []
    with storage_errors("gc"):
        for ref in kept.in_use:
            if not store.exists(ref):
                turn.put_back(ref)
        for position, candidate in enumerate(candidates):
            try:
                _expire(store, rule, candidate)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                # a full disk: take half of them now, using the room that the other tombstones took
                for late in candidates[position // 2 : position + 1]:
                    ledger = store.ledger(late.ref.run, late.ref.kind)
                    ledger.take_back(late.ref.version, late.folder)
                candidates = candidates[: position // 2]
                if not candidates:
                    raise
                break
        kept = find_kept(store, rule.keep, rule.moments, rule.spared)
        still = {(candidate.ref, candidate.folder) for candidate in _candidates(store, rule, kept)}
        for candidate in candidates:
            is_to_go = (candidate.ref, candidate.folder) in still
            if is_to_go and turn.take(candidate.ref, candidate.folder):
                taken.append(candidate)
        for run, kind in product(rule.runs_of(store), KINDS):
            # a process was killed before its move, or the version came into use
            ledger = store.ledger(run, kind)
            for number, folder in ledger.tombstones():
                if store.storage.exists(f"{Ref(run, kind, number).folder}/{folder}"):
                    ledger.take_back(number, folder)
    return taken


def _expire(store: Store, rule: Rule, candidate: Candidate) -> None:
    """Write the tombstone of the candidate, before its files move."""
    ref = candidate.ref
    ledger = store.ledger(ref.run, ref.kind)
    if ledger.manifest(ref.version) != candidate.manifest:
        ledger.write_copy(candidate.manifest)
    why = candidate.deleted_why
    ledger.expire(
        ref.version,
        rule.why(candidate.folder) if why is None else why,
        commit_id=candidate.manifest.commit_id,
        expired=why is None,
        files=candidate.files,
        folder=candidate.folder,
    )


# -- staging


def leftovers_of(store: Store, rule: Rule) -> Iterator[Leftover]:
    """Yield abandoned staging folders, and folders that were half deleted.

    Staging is abandoned if no process holds one of its leases, and if its versions are committed or
    it is older than the grace period.
    """
    storage = store.storage
    for run in rule.runs_of(store):
        keys_of: dict[str, list[str]] = {}
        for kind in KINDS:
            for name in storage.list(f"{run}/{kind}/.staging"):
                run_key = name.partition(".")[0]
                if _RUN_KEY.fullmatch(run_key):
                    keys_of.setdefault(run_key, []).append(f"{run}/{kind}/.staging/{name}")
            for name in storage.list(f"{run}/{kind}"):
                if name.endswith(".gone"):
                    key = f"{run}/{kind}/{name}"
                    yield Leftover(run, "", [key], size(storage, key))
        for run_key, keys in keys_of.items():
            kinds = {key.split("/")[1] for key in keys}
            is_done = all(
                store.index(run, kind).numbers_with(run_key, expired=True) for kind in kinds
            )
            is_old = min(_seconds_unchanged(storage, key) for key in keys) >= rule.grace_seconds
            leases = [Leases(storage, f"{run}/{kind}/.staging/{run_key}.leases") for kind in KINDS]
            if (is_done or is_old) and not any(map(_is_at_work, leases)):
                yield Leftover(run, run_key, keys, sum(size(storage, key) for key in keys))


def _seconds_unchanged(storage: Storage, prefix: str) -> float:
    """Return the seconds since anything below `prefix` changed, by this host's clock."""
    return time.time() - max((entry.st_mtime for entry in storage.stats(prefix)), default=0.0)


def _is_at_work(leases: Leases, but: str = "") -> bool:
    """Return True if a process holds one of the leases, other than the lease `but`.

    A holder on another host counts as gone if nothing here changed for a lease's lifetime.
    """
    is_silent = _seconds_unchanged(leases.storage, leases.prefix) > SECONDS_TO_LIVE
    holders = [leases.holder(name) for name in leases.names() if name != but]
    return any(holder and (holder.owner.is_visible or not is_silent) for holder in holders)


def _sweep(storage: Storage, leftover: Leftover) -> bool:
    """Delete staged work. Returns False if a process has begun to work on it."""
    folders = {key.rpartition("/")[0] for key in leftover.keys} if leftover.run_key else ()
    all_leases = [
        Leases(storage, f"{folder}/{leftover.run_key}.leases", "gc") for folder in folders
    ]
    with ExitStack() as stack, storage_errors(f"{leftover.run} staging"):
        for leases in all_leases:
            # a process that starts meanwhile waits for this lease, or finds it taken
            lease = leases.take("work", from_living=not _is_at_work(leases))
            if lease is None:
                return False
            stack.callback(lease.release)
            if _is_at_work(leases, but="work"):
                return False
        for key in leftover.keys:
            if not key.endswith(".leases"):
                storage.delete_tree(key)
        for leases in all_leases:
            storage.delete_tree(leases.prefix)
    return True
