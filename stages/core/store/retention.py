"""Retention: which versions are kept, and deleting, restoring and quarantining a single version.

Versions leave the store by age (`quiver gc`), on purpose (`quiver rm`), or because they are
damaged. Three kinds of versions are roots:

    tagged     the version a tag points at, and the one it would go back to
    newest     the last `keep` of each kind of each run
    at work    inputs of a stage that is at work, and versions with its run key

A kept version keeps its inputs, with these exceptions. A policy that is not a root keeps only the
base of its adapter. Prompts keep no policy, because its weights took no part. Prompts keep the
rewards they were chosen by, but not the inputs of those rewards.

So rewards can be joined with their rollouts. Rollouts can be scored again, and trained on by the
policy that sampled them. Evaluations can be shown with their answers. Training can continue from a
root policy with the rollouts that it replays and the reference of its KL term. Older versions
expire, and lineage shows them as `expired`.

Optimizer state is needed only to continue training. It stays for the last `moments` policies of
each run, and for policies that are tagged or read by a stage at work.

Manifests stay for ever. To delete a version, its tombstone is written to the ledger, then one
rename moves it to `.trash`, then it is deleted (see `trash`). After the tombstones are written, the
kept versions are computed again, and versions that came into use stay. For this to be safe, a
process that tags or reads a version announces it first and looks for a tombstone right afterwards.

A damaged version is moved to `STORE/.quarantine` and does not expire. Versions made from it lack an
input until it is made again.
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
    """A stage that a process is working on."""

    name: str
    """Name for error messages: `process 17 (demo/rewards)`."""
    run_key: str
    refs: frozenset[str]
    """References of the versions that it reads."""


def stages_at_work(store: Store) -> Iterator[StageAtWork]:
    """Yield the stages that a process holds a lease of."""
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
    """The versions and optimizer states to keep."""

    versions: set[Ref] = field(default_factory=set)
    optimizer: set[Ref] = field(default_factory=set)
    """Policies that keep their optimizer state, if they have one."""
    in_use: set[Ref] = field(default_factory=set)
    """Versions that a tag or a stage at work refers to."""
    run_keys: set[str] = field(default_factory=set)
    """Run keys of stages at work; versions with one of these are kept too."""


def folders_of(store: Store) -> Iterator[str]:
    """Yield the keys in the store that must be folders, or absent."""
    yield from (trash.FOLDER, trash.LEASES, QUARANTINE)
    names = filter(NAME.fullmatch, store.storage.list(""))
    yield from (name for name in names if store.storage.path(name).is_symlink())  # runs
    for run in store.runs():
        yield f"{run}/tags"
        for kind in KINDS:
            yield from (f"{run}/{kind}{name}" for name in ("", "/.ledger", "/.staging", "/.index"))


def find_kept(
    store: Store, keep: int | None, moments: int | None, spared: Collection[str] = ()
) -> Kept:
    """Compute which versions and optimizer states are kept.

    Args:
        keep: newest versions to keep per kind and run. None: all.
        moments: newest policies per run that keep their optimizer state. None: all.
        spared: references to keep as if a tag named them.

    Raises:
        CorruptError: a tag, or the manifest of a kept version, cannot be read, so the answer is
            unknown.
    """
    kept = Kept()
    # stages at work come first: a stage that ended before this line has published its versions
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
    """Return the versions that this one keeps."""
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
    """Return the version's manifest, or the ledger's copy if it is torn. Raises CorruptError."""
    try:
        return store.version(ref).manifest
    except CorruptError:
        manifest = store.ledger(ref.run, ref.kind).manifest(ref.version)
        if manifest is None:
            raise
        return manifest


# -- one version


def users_of(store: Store, ref: Ref) -> tuple[list[str], list[str]]:
    """Return the tags of the version's run that point at it, and the versions made from it.

    Tags and manifests that cannot be read are skipped; `verify` reports them.
    """
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
    """Delete a version on purpose. It passes through the trash and is deleted from there at once.

    Returns:
        The version's reference, and the references of versions made from it.

    Raises:
        ConflictError: a tag points at it, a policy needs it as base of its adapter, or a stage at
            work reads it.
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
    """Check that a version may be deleted.

    Raises:
        ConflictError: a tag points at it, a policy needs it as base of its adapter, or a stage at
            work reads it.
        CorruptError: a tag of the run is torn, so it may point at the version.
    """
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
    """Restore an expired version, or its optimizer state, from the trash.

    Returns:
        The version's reference, and the restored parts: `version` or `optimizer`.

    Raises:
        LineageError: the version is not in the store and not in the trash.
        ConfigError: the version exists and no part of it is in the trash.
    """
    target = parse(ref)
    ledger = store.ledger(target.run, target.kind)
    restored = []
    with trash.open_trash(store.storage) as turn:
        for number, folder in ledger.tombstones():
            if number == target.version and turn.put_back(target, folder):
                restored.append(folder or "version")
    if not restored:
        store.resolve(target)  # raises the reason if the version is gone
        raise ConfigError(str(target), "nothing of it expired", next=f"quiver show {target}")
    return target, restored


def is_damaged(store: Store, ref: Ref) -> bool:
    """Return True if a version's manifest or files differ from what was written."""
    try:
        store.version(ref).verify()
    except QuiverError:
        return True
    return False


def quarantine(store: Store, ref: str | Ref) -> tuple[Ref, Path]:
    """Move a damaged version to the quarantine, byte for byte.

    Its number stays given. A stage that makes the same content again gets it.

    Returns:
        The version's reference, and the folder where it is now.

    Raises:
        ConfigError: the version is whole.
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
