"""What `quiver gc` does: versions and optimizer state whose time is over go to the trash, what lay
there long enough is deleted, and so is what was staged and given up.

    rule = Rule(keep=2, moments=1, grace_seconds=86400)
    collect(store, rule)                 # only looks
    collect(store, rule, apply=True)     # does it

What stays is told by `retention`. Nothing is done where that cannot be told. All of it may be
killed at any point: the next one finishes, or takes back, what it finds half done.
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
"""What plans read of a policy beside its manifest; it stays in the tombstone."""
_RUN_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Rule:
    """What stays, and how long what goes can be brought back."""

    keep: int | None = None
    """Versions of each kind of each run. None: all."""
    moments: int | None = 1
    """Policies of each run whose optimizer state stays. None: all."""
    grace_seconds: float = 24 * 3600
    """How long a version lies in the trash, and how long staged work waits for who goes on."""
    runs: Collection[str] | None = None
    """Runs that are cleaned. None: all. What stays is asked of all in either case."""
    spared: tuple[str, ...] = ()
    """Versions that stay as if a tag named them."""

    def runs_of(self, store: Store) -> Collection[str]:
        """Names of the runs that are cleaned."""
        return store.runs() if self.runs is None else self.runs

    def why(self, folder: str) -> str:
        """For the tombstone."""
        return f"gc, moments = {self.moments}" if folder else f"gc, keep = {self.keep}"


@dataclass(frozen=True)
class Candidate:
    """A version, or the folder of its optimizer state, that is to go."""

    ref: Ref
    folder: str
    """Empty for the whole version."""
    bytes: int
    manifest: Manifest
    deleted_why: str | None
    """Set where `quiver rm` was killed on the way."""
    files: dict[str, str]
    """What the tombstone keeps."""


@dataclass(frozen=True)
class Leftover:
    """What is staged of one run_key, and nobody goes on with."""

    run: str
    run_key: str
    keys: list[str]
    bytes: int


@dataclass
class Collected:
    """What went, or would go, in bytes; and what lies about besides."""

    versions: list[Candidate] = field(default_factory=list)
    optimizer: list[Candidate] = field(default_factory=list)
    staging: list[Leftover] = field(default_factory=list)
    deleted_bytes: int = 0
    """Out of the trash."""
    trash_bytes: int = 0
    """In the trash, with what went there just now."""
    quarantine: dict[str, int] = field(default_factory=dict)
    """Bytes by folder; they stay until somebody deletes them."""


def collect(store: Store, rule: Rule, *, apply: bool = False) -> Collected:
    """Clean the store up by `rule`, or only say what would go. CorruptError where a tag cannot be
    read, or a manifest of what stays, or where a folder is none; BusyError where another process is
    at it."""
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
    """Bytes of the files below `prefix`, or of the one of that name."""
    return sum(entry.st_size for entry in storage.stats(prefix) if stat.S_ISREG(entry.st_mode))


# -- versions


def _candidates(store: Store, rule: Rule, kept: Kept) -> list[Candidate]:
    """What is to go by now."""
    candidates = []
    for run, kind in product(rule.runs_of(store), KINDS):
        ledger = store.ledger(run, kind)
        tombstones = ledger.tombstones()
        for number in store.numbers(run, kind):
            ref = Ref(run, kind, number)
            with suppress(CorruptError):  # what is damaged stays; `verify` tells of it
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
    """The reason that `quiver rm` was given for this very version; None where there was none."""
    tombstone = ledger.tombstone(version.ref.version)
    is_meant = tombstone is not None and tombstone.commit_id == version.manifest.commit_id
    return tombstone.why if is_meant and not tombstone.expired else None


def _candidate(version: Version, folder: str, deleted_why: str | None) -> Candidate:
    """CorruptError where what the tombstone is to keep is damaged."""
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
    """Move what is to go into the trash: tombstones, another look at what stays, the moves."""
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
                # half of them now, with the room that the tombstones of the others took
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
            # of whoever was killed, and of what somebody needs by now
            ledger = store.ledger(run, kind)
            for number, folder in ledger.tombstones():
                if store.storage.exists(f"{Ref(run, kind, number).folder}/{folder}"):
                    ledger.take_back(number, folder)
    return taken


def _expire(store: Store, rule: Rule, candidate: Candidate) -> None:
    """Write down that the candidate is taken away."""
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
    """What is staged that nobody is at, and that is committed or older than the grace time; and
    what was half deleted."""
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
            is_done = all(store.index(run, kind).find(run_key, expired=True) for kind in kinds)
            is_old = min(_seconds_unchanged(storage, key) for key in keys) >= rule.grace_seconds
            leases = [Leases(storage, f"{run}/{kind}/.staging/{run_key}.leases") for kind in KINDS]
            if (is_done or is_old) and not any(map(_is_at_work, leases)):
                yield Leftover(run, run_key, keys, sum(size(storage, key) for key in keys))


def _seconds_unchanged(storage: Storage, prefix: str) -> float:
    """For how long nothing changed there, by this host's clock."""
    return time.time() - max((entry.st_mtime for entry in storage.stats(prefix)), default=0.0)


def _is_at_work(leases: Leases, but: str = "") -> bool:
    """Whether a process holds one of the leases, other than lease `but`. One of another host counts
    as gone where it was not heard of for as long as a lease lives."""
    is_silent = _seconds_unchanged(leases.storage, leases.prefix) > SECONDS_TO_LIVE
    holders = [leases.holder(name) for name in leases.names() if name != but]
    return any(holder and (holder.owner.is_visible or not is_silent) for holder in holders)


def _sweep(storage: Storage, leftover: Leftover) -> bool:
    """Delete what is staged, unless somebody is at it by now."""
    folders = {key.rpartition("/")[0] for key in leftover.keys} if leftover.run_key else ()
    all_leases = [
        Leases(storage, f"{folder}/{leftover.run_key}.leases", "gc") for folder in folders
    ]
    with ExitStack() as stack, storage_errors(f"{leftover.run} staging"):
        for leases in all_leases:
            # whoever comes meanwhile waits for this, or finds another at the work
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
