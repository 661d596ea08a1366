"""What stays in a store, and what leaves it: by its age (`quiver gc`), on purpose (`quiver rm`), or
since it is damaged.

Three kinds of versions are roots:

    tagged     what a tag points at, and what it would go back to
    newest     the last `keep` of each kind of each run
    at work    what a stage that is at work reads, and what has its run_key

A version that stays keeps the versions that it was made of, except that a policy which is no root
itself keeps only the base that its adapter is relative to, and prompts keep no policy, since its
weights took no part, and of the rewards that they were chosen by not what was scored. So rewards
can be joined with their rollouts, rollouts be scored again and trained on by the policy that
sampled them, evaluations be shown with their answers; and a policy that is a root can be gone on
with: with the rollouts that are replayed, and the reference that its KL term holds on to. What is
older expires: lineage shows it as `expired`.

The optimizer state of a policy is of use only to who goes on from it. It stays for the last
`moments` policies of each run, and for those that are tagged or that a stage at work reads.

Manifests stay for ever. What expires, or is deleted by `quiver rm`, is written down in the ledger
of its kind, then moved to `.trash` by one rename, then deleted (see `trash`). After the tombstones
are written all is asked once more, and what somebody needs by now stays: whoever tags a version, or
begins to read it, looks for its tombstone right after saying so.

A damaged version is moved to `STORE/.quarantine` and does not expire: what was made of it misses it
until it is made again.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from quiver.schemas.errors import ConfigError, ConflictError, CorruptError, QuiverError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import KINDS, NAME, Ref, as_version, parse

from . import tags, trash
from .leases import Leases
from .notes import SOURCES, read_note
from .reserve import reserve_for_deleting
from .storage import make_folder, storage_errors
from .versions import Store

QUARANTINE = ".quarantine"


@dataclass(frozen=True)
class StageAtWork:
    """A stage that some process is at."""

    name: str
    """What errors call it: `process 17 (demo/rewards)`."""
    run_key: str
    refs: frozenset[str]
    """What it reads."""


def stages_at_work(store: Store) -> Iterator[StageAtWork]:
    """The stages of which somebody holds a lease."""
    for run, kind in product(store.runs(), KINDS):
        staging = f"{run}/{kind}/.staging"
        for folder in store.storage.list(staging):
            run_key, _, suffix = folder.partition(".")
            if suffix != "leases":
                continue
            leases = Leases(store.storage, f"{staging}/{folder}")
            holders = list(filter(None, map(leases.holder, leases.names())))
            if holders:
                note = read_note(store.storage, f"{staging}/{run_key}.notes/{SOURCES}")
                refs = frozenset(note["refs"] if note else ())
                yield StageAtWork(f"process {holders[0].owner.pid} ({run}/{kind})", run_key, refs)


@dataclass
class Kept:
    """What stays."""

    versions: set[Ref] = field(default_factory=set)
    optimizer: set[Ref] = field(default_factory=set)
    """Policies whose optimizer state stays, where they have one."""
    in_use: set[Ref] = field(default_factory=set)
    """Those among the versions that a tag or a stage at work names."""
    run_keys: set[str] = field(default_factory=set)
    """Of stages at work: what bears one stays, too."""


def folders_of(store: Store) -> Iterator[str]:
    """Where the store has a folder, or nothing yet."""
    yield from (trash.FOLDER, trash.LEASES, QUARANTINE)
    names = filter(NAME.fullmatch, store.storage.list(""))
    yield from (name for name in names if store.storage.path(name).is_symlink())  # of runs
    for run in store.runs():
        yield f"{run}/tags"
        for kind in KINDS:
            yield from (f"{run}/{kind}{name}" for name in ("", "/.ledger", "/.staging", "/.index"))


def find_kept(
    store: Store, keep: int | None, moments: int | None, spared: Collection[str] = ()
) -> Kept:
    """What stays, with the last `keep` versions of each kind of each run, and the state of the last
    `moments` policies; None for all of them. `spared` stay as what a tag names does. CorruptError
    if a tag, or the manifest of a version that stays, cannot be read: then it cannot be told."""
    kept = Kept()
    # first who is at work: whoever has finished before that has published what it made
    for stage in list(stages_at_work(store)):
        kept.run_keys.add(stage.run_key)
        kept.in_use.update(filter(None, map(as_version, stage.refs)))
    roots = set(map(parse, spared))
    for run in store.runs():
        for name in store.tag_names(run):
            refs = (store.tagged(run, name), tags.previous(store.history(run, name)))
            roots.update(parse(ref) for ref in refs if ref)
    kept.in_use |= roots
    kept.optimizer |= kept.in_use
    for run, kind in product(store.runs(), KINDS):
        newest_first = [Ref(run, kind, number) for number in reversed(store.numbers(run, kind))]
        roots.update(newest_first[:keep])
        if kind == "policy":
            kept.optimizer.update(newest_first[:moments])
    if keep is None:
        kept.versions = roots | kept.in_use
        return kept
    chosen_by: set[Ref] = set()
    waiting = [*roots, *kept.in_use]
    while waiting:
        ref = waiting.pop()
        if ref in kept.versions or not store.exists(ref):
            continue
        kept.versions.add(ref)
        manifest = _manifest(store, ref)
        sources = _sources(manifest, is_root=ref in roots)
        if manifest.kind == "prompts":
            chosen_by.update(filter(store.exists, sources))
        else:
            waiting += sources
    kept.versions |= chosen_by
    return kept


def _sources(manifest: Manifest, *, is_root: bool) -> list[Ref]:
    """The versions that this one keeps."""
    names = [entry.ref for entry in manifest.inputs]
    names += [model.ref for model in manifest.models if model.weights]
    if manifest.kind == "policy":
        if is_root:
            made_with_it = {"advantages", "updates"} & manifest.metrics.keys()
            names += [manifest.metrics[kind] for kind in made_with_it]
        else:
            names = [entry.ref for entry in manifest.inputs if entry.role == "base"]
    return [ref for ref in map(as_version, names) if ref and str(ref) != manifest.ref]


def _manifest(store: Store, ref: Ref) -> Manifest:
    """The version's manifest, or the ledger's copy where it is torn. CorruptError."""
    try:
        return store.version(ref).manifest
    except CorruptError:
        manifest = store.ledger(ref.run, ref.kind).manifest(ref.version)
        if manifest is None:
            raise
        return manifest


# -- one version


def users_of(store: Store, ref: Ref) -> tuple[list[str], list[str]]:
    """What refers to a version: tags of its run, and references of versions made of it. A tag or
    manifest that is torn or cannot be read is passed over; `verify` tells of it."""
    tag_names, versions = [], []
    with suppress(QuiverError, OSError):
        for name in store.tag_names(ref.run):
            with suppress(QuiverError, OSError):
                if store.tagged(ref.run, name) == str(ref):
                    tag_names.append(name)
    for run, kind in product(store.runs(), KINDS):
        with suppress(QuiverError, OSError):
            for other in store.refs(run, kind):
                with suppress(QuiverError, OSError):
                    manifest = store.version(other).manifest
                    sources = {entry.ref for entry in (*manifest.inputs, *manifest.models)}
                    if str(ref) in sources and other != ref:
                        versions.append(str(other))
    return tag_names, versions


def remove(store: Store, ref: str | Ref, why: str = "") -> tuple[Ref, list[str]]:
    """Delete a version on purpose: its reference, and versions that were made of it. It goes the
    way of what expires, and out of the trash at once.

    ConflictError where a tag points at it, where a policy there is would be no model without it, or
    where a stage that reads it is at work.
    """
    target = store.resolve(ref)
    _require_unused(store, target)
    ledger = store.ledger(target.run, target.kind)
    with storage_errors(target), reserve_for_deleting(store):
        with trash.open_trash(store.storage) as turn:
            commit_id = ""
            with suppress(CorruptError):
                commit_id = store.version(target).manifest.commit_id
            ledger.note_missing([target.version])
            ledger.expire(target.version, why, commit_id=commit_id)
            try:
                _require_unused(store, target)
            except QuiverError:
                ledger.take_back(target.version)
                raise
            turn.take(target)
        trash.delete(store.storage, f"{turn.folder}/{target.run}")
    return target, users_of(store, target)[1]


def _require_unused(store: Store, ref: Ref) -> None:
    """ConflictError where a tag points at the version, or a stage at work reads it. CorruptError:
    a torn tag of the run may point at it."""
    for name in store.tag_names(ref.run):
        if store.tagged(ref.run, name) == str(ref):
            raise ConflictError(
                str(ref),
                f"tag {name} points at it",
                next="point the tag at another version first",
            )
    users = [parse(user) for user in users_of(store, ref)[1]]
    policies = [user for user in users if user.kind == ref.kind == "policy"]
    for manifest in (store.version(policy).manifest for policy in policies):
        base = manifest.input("base")
        names = [entry.name for entry in manifest.files if "/" not in entry.name]
        has_weights = any(name.endswith(".safetensors") for name in names)
        if base is not None and base.ref == str(ref) and not has_weights:
            raise ConflictError(
                str(ref),
                f"{manifest.ref} is an adapter alone, on its weights",
                next=f"delete {manifest.ref} first",
            )
    for stage in stages_at_work(store):
        if str(ref) in stage.refs:
            raise ConflictError(
                str(ref), f"{stage.name} reads it", next="wait for it, then delete it"
            )


def restore(store: Store, ref: str | Ref) -> tuple[Ref, list[str]]:
    """Bring back out of the trash a version whose files expired, or its optimizer state: its
    reference, and what came back. LineageError where there is nothing to bring back."""
    target = parse(ref)
    ledger = store.ledger(target.run, target.kind)
    restored = []
    with trash.open_trash(store.storage) as turn:
        for number, folder in ledger.tombstones():
            if number == target.version and turn.put_back(target, folder):
                restored.append(folder or "version")
    if not restored:
        store.resolve(target)  # says why it is not there
        raise ConfigError(str(target), "nothing of it expired", next=f"quiver show {target}")
    return target, restored


def is_damaged(store: Store, ref: Ref) -> bool:
    """Whether a version's manifest or files are not what was written."""
    try:
        store.version(ref).verify()
    except QuiverError:
        return True
    return False


def quarantine(store: Store, ref: str | Ref) -> tuple[Ref, Path]:
    """Put a damaged version aside, byte for byte: its reference, and the folder where it is now.
    ConfigError where it is whole.

    Its number stays given. Whoever makes the same content again gets it.
    """
    target = store.resolve(ref)
    if not is_damaged(store, target):
        raise ConfigError(str(target), "is whole", next=f"quiver rm {target}")
    name = f"{target.run}-{target.kind}-{target.version}-{uuid.uuid4().hex[:8]}"
    folder = store.path / QUARANTINE / name
    with storage_errors(target):
        store.ledger(target.run, target.kind).note_missing([target.version])
        make_folder(folder.parent)
        shutil.move(store.storage.path(target.folder), folder)
    return target, folder
