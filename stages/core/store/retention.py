"""Retention: which versions keep their data, and deleting the data of the others.

Data leave the store by age (`quiver gc`), on purpose (`quiver rm`), or when a grace time is over.
Three kinds of versions are roots:

    tagged     the version a tag points at, and the one it would go back to
    newest     the last `keep` of each kind of each run, and as many of its sweeps
    at work    inputs of a stage that is at work, and versions with its run key

A kept version keeps its inputs, with these exceptions. A policy that is not a root keeps only the
base of its adapter. Prompts keep no policy, because its weights took no part. Prompts keep the
rewards they were chosen by, but not the inputs of those rewards.

So rewards can be joined with their rollouts. Rollouts can be scored again, and trained on by the
policy that sampled them. Evaluations can be shown with their answers. Training can continue from a
root policy with the rollouts that it replays and the reference of its KL term. Older versions
expire, and lineage shows them as `expired`.

Optimizer state is needed only to continue training. It stays for the last `moments` policies of
each run, and of its sweeps, and for policies that are tagged or read by a stage at work.

A collection marks what is not kept (see `marks`). From then on it is expired: no process begins to
read it, and one that has opened it may read on. After the grace time a later collection deletes
the data, unless a tag points at the version or a stage at work reads it. Manifests and marks stay
for ever, and data are not put back: a stage that needs expired data makes a new version.

A process that tags or reads a version says so first, by the tag's entry or its note, and then looks
for a mark. A collection marks first, and then looks for tags and notes. So one sees the other.

    rule = Rule(keep=2, moments=1, grace_seconds=86400)
    collect(store, rule)                 # only reports
    collect(store, rule, apply=True)     # marks and deletes
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from quiver.schemas.errors import ConflictError, CorruptError, LineageError, QuiverError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import NAME, Ref, as_version, parse
from quiver.stages.core.files import storage_errors

from . import marks, tags
from .leases import Leases
from .listing import EXPIRED, NO_OPTIMIZER, REMOVED, is_of_sweep
from .notes import SOURCES, WORK, read_note
from .versions import OPTIMIZER_FOLDER, Store, Version

_DAMAGED = (CorruptError, LineageError)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_PLANNED_WITH = ("config.json", "generation_config.json")
"""Files of a policy that plans read beside its manifest; the mark keeps their text."""


# -- unfinished work


@dataclass(frozen=True)
class Work:
    """Unfinished work in `.work`: one repetition of one run key."""

    run: str
    kind: str
    run_key: str
    repetition: int
    names: list[str]
    """Names below the kind: `.work/KEY.0.notes`, `.data/KEY.0`."""

    @property
    def prefix(self) -> str:
        """Prefix in `.work`; `.notes`, `.leases` and `.resume` follow it."""
        return f"{self.run}/{self.kind}/.work/{self.run_key}.{self.repetition}"

    @property
    def keys(self) -> list[str]:
        """Prefixes of its objects."""
        return [f"{self.run}/{self.kind}/{name}" for name in self.names]


def unfinished(store: Store, run: str, kind: str) -> list[Work]:
    """Return the unfinished work of one kind in one run, by run key and repetition."""
    return _by_repetition(
        run, kind, (f".work/{n}" for n in store.storage.list(f"{run}/{kind}/.work"))
    )


def _by_repetition(run: str, kind: str, names: Iterable[str]) -> list[Work]:
    names_of: dict[tuple[str, int], list[str]] = {}
    for name in names:
        if match := WORK.fullmatch(name.partition("/")[2]):
            names_of.setdefault((match[1], int(match[2])), []).append(name)
    return [Work(run, kind, *work, names) for work, names in names_of.items()]


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
    for run, kind in store.kinds():
        for work in unfinished(store, run, kind):
            holders = Leases(store.storage, f"{work.prefix}.leases").holders()
            if holders:
                note = read_note(store.storage, f"{work.prefix}.notes/{SOURCES}")
                refs = frozenset(note["refs"] if note else ())
                name = f"process {holders[0].owner.pid} ({run}/{kind})"
                yield StageAtWork(name, work.run_key, refs)


# -- which versions stay


@dataclass
class Kept:
    """The versions and optimizer states to keep."""

    versions: set[Ref] = field(default_factory=set)
    optimizer: set[Ref] = field(default_factory=set)
    """Policies that keep their optimizer state, if they have one."""
    in_use: set[Ref] = field(default_factory=set)
    """Versions that a tag or a stage at work refers to."""
    read: set[Ref] = field(default_factory=set)
    """Versions that a stage at work reads."""
    run_keys: set[str] = field(default_factory=set)
    """Run keys of stages at work; versions with one of these are kept too."""


def folders_of(store: Store) -> Iterator[str]:
    """Yield the keys in the store that must be folders, or absent."""
    others = {*filter(NAME.fullmatch, store.storage.list(""))} - {*store.runs(), "store.json"}
    for name in sorted(others):
        try:
            store.storage.files(name)
        except CorruptError:  # a run that is a link
            yield name
    yield from (f"{run}/tags" for run in store.runs())
    for run, kind in store.kinds():
        yield from (f"{run}/{kind}", f"{run}/{kind}/.work")


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
    for stage in stages_at_work(store):
        kept.run_keys.add(stage.run_key)
        kept.read.update(filter(None, map(as_version, stage.refs)))
    roots = set(map(parse, spared))
    for run in store.runs():
        for name in store.tag_names(run):
            refs = (store.tagged(run, name), tags.previous(store.history(run, name)))
            roots.update(parse(ref) for ref in refs if ref)
    for ref in [*roots]:
        with suppress(LineageError):  # its data are gone, and nothing is read in its place
            roots.add(store.resolve(ref))
    kept.in_use = roots | kept.read
    kept.optimizer |= kept.in_use
    for run, kind in store.kinds():
        for newest_first in _counted(store, run, kind):
            roots.update(newest_first[:keep])
            if kind == "policy":
                kept.optimizer.update(newest_first[:moments])
    if keep is None:
        kept.versions = set(filter(store.exists, roots)) | kept.read
        return kept

    def follow(starts: Iterable[Ref], resolve: Callable[[Ref], Ref]) -> set[Ref]:
        waiting, reached, chosen_by = [*starts], set(), set()
        while waiting:
            with suppress(LineageError):  # its data are gone, or will be
                ref = resolve(waiting.pop())
                if ref in reached:
                    continue
                reached.add(ref)
                manifest = store.version(ref).manifest
                sources = _sources(manifest, is_root=ref in roots)
                if manifest.kind == "prompts":
                    chosen_by.update(filter(store.exists, sources))
                else:
                    waiting += sources
        return reached | chosen_by

    # a stage at work keeps reading the data that it opened, a new reader takes what was made again
    kept.read = follow(kept.read, lambda ref: ref)
    kept.versions = kept.read | follow([*roots, *kept.in_use], store.resolve)
    return kept


def _counted(store: Store, run: str, kind: str) -> tuple[list[Ref], list[Ref]]:
    """Return a run's own versions of one kind, and those of its sweeps, the newest first."""
    listing = store.listing(run, kind)
    swept = {summary.number for summary in listing.summaries() if is_of_sweep(summary.note)}
    own, of_sweeps = [], []
    for number in reversed(listing.visible(expired=store.sees_expired)):
        (of_sweeps if number in swept else own).append(Ref(run, kind, number))
    return own, of_sweeps


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


# -- one version


def _names_of(store: Store, ref: Ref) -> set[str]:
    """Return the references that lead to a version: its own, and each reference to a version that
    it replaces because the data are gone. Of a damaged version only its own is known."""
    names = {str(ref)}
    with suppress(CorruptError):
        for number in store.listing(*ref[:2]).find(store.version(ref).manifest.run_key):
            other = ref._replace(version=number)
            with suppress(LineageError):
                if store.resolve(other) == ref:
                    names.add(str(other))
    return names


def users_of(
    store: Store, ref: Ref, names: Collection[str] | None = None
) -> tuple[list[str], list[str]]:
    """Return the tags of the version's run that point at it, and the versions made from it.

    Damaged tags and manifests are skipped; `verify` reports them.

    Args:
        names: References that lead to the version. Default: they are looked up (`_names_of`).

    Raises:
        OSError: the store cannot be read, so it is unknown who needs the version.
    """
    names = {*(_names_of(store, ref) if names is None else names)}
    tag_names, versions = [], []
    with suppress(*_DAMAGED):
        for name in store.tag_names(ref.run):
            with suppress(*_DAMAGED):
                if store.tagged(ref.run, name) in names:
                    tag_names.append(name)
    for run, kind in store.kinds():
        with suppress(*_DAMAGED):
            summaries = store.summaries(run, kind)
            versions += [str(other) for other, made in summaries if names & made.sources.keys()]
    return tag_names, versions


def remove(store: Store, ref: str | Ref, why: str = "") -> tuple[Ref, list[str]]:
    """Delete a version's data on purpose, at once.

    Returns:
        The version's reference, and the references of versions made from it.

    Raises:
        ConflictError: a tag points at it, a policy needs it as base of its adapter, or a stage at
            work reads it.
    """
    target = parse(ref)
    has_number = isinstance(target.version, int)
    aside = marks.read(store.storage, target, REMOVED) if has_number else None
    if aside is not None and aside.keep:
        users = users_of(store, target)[1]
        _delete_data(store, target)
        return target, users
    if aside is not None:
        raise marks.gone_error(store.storage, target, [REMOVED])
    target = store.with_expired().resolve(target)
    _data(store, target, REMOVED)  # refuses a link: what it leads to may be another store's
    names = _names_of(store, target)  # once it is marked, the others no longer lead to it
    _require_unused(store, target, names)
    with storage_errors(target):
        marks.write(store.storage, target, REMOVED, why)
        try:
            users = _require_unused(store, target, names)
        except (QuiverError, OSError):
            # it came into use meanwhile, or may have; no other process acts on the mark so soon
            store.storage.delete(marks.key_of(target, REMOVED))
            raise
        _delete_data(store, target)
    return target, users


def _require_unused(store: Store, ref: Ref, names: set[str]) -> list[str]:
    """Check that a version, to which these references lead, may be deleted.

    Returns the references of versions made from it.

    Raises:
        ConflictError: a tag points at it, a policy needs it as base of its adapter, or a stage at
            work reads it.
        CorruptError: a tag of the run is torn, so it may point at the version.
    """
    for name in store.tag_names(ref.run):
        if store.tagged(ref.run, name) in names:
            raise ConflictError(
                str(ref),
                f"tag {name} points at it",
                next="point the tag at another version first",
            )
    users = users_of(store, ref, names)[1]
    policies = [user for user in map(parse, users) if user.kind == ref.kind == "policy"]
    for policy in map(store.version, policies):
        with suppress(CorruptError):  # `verify` reports it
            base = policy.manifest.input("base")
            files = policy.files.names
            has_weights = any("/" not in n and n.endswith(".safetensors") for n in files)
            if base is not None and base.ref in names and not has_weights:
                raise ConflictError(
                    str(ref),
                    f"{policy.ref} is an adapter alone, on its weights",
                    next=f"delete {policy.ref} first",
                )
    for stage in stages_at_work(store):
        if names & set(stage.refs):
            raise ConflictError(
                str(ref), f"{stage.name} reads it", next="wait for it, then delete it"
            )
    return users


def put_aside(store: Store, ref: str | Ref) -> Ref:
    """Mark a damaged version as removed, and leave its data where they are, for a user to look at.

    A stage that needs it makes it again, under another number.
    """
    target = store.resolve(ref)
    with storage_errors(target):
        marks.write(store.storage, target, REMOVED, "damaged, put aside", keep=True)
    return target


# -- collections


@dataclass(frozen=True)
class Rule:
    """Which versions keep their data, and for how long expired data stay."""

    keep: int | None = None
    """Versions to keep per kind and run. What the run's sweeps made is counted apart. None: all."""
    moments: int | None = 1
    """Policies per run that keep their optimizer state. None: all."""
    grace_seconds: float = 24 * 3600
    """Seconds that expired data stay, and that unfinished work stays resumable."""
    runs: Collection[str] | None = None
    """Runs to clean. None: all. Versions of every run still count as users of others."""
    spared: tuple[str, ...] = ()
    """Versions that are kept as if a tag named them."""

    def runs_of(self, store: Store) -> Collection[str]:
        """Return the names of the runs to clean."""
        return store.runs() if self.runs is None else self.runs


@dataclass(frozen=True)
class Expiring:
    """Data that are marked, or will be: of a version, or of its optimizer state alone."""

    ref: Ref
    mark: str
    """Name of the mark."""
    bytes: int


@dataclass
class Collected:
    """Result of a collection, done or planned."""

    marked: list[Expiring] = field(default_factory=list)
    """Data that it marked; they are deleted after the grace time."""
    waiting: list[Expiring] = field(default_factory=list)
    """Data that were marked before, and whose grace time is not over."""
    deleted: list[Expiring] = field(default_factory=list)
    work: list[tuple[Work, int]] = field(default_factory=list)
    """Unfinished work that was abandoned and is deleted, and its bytes."""


def collect(store: Store, rule: Rule, *, apply: bool = False) -> Collected:
    """Clean up the store by `rule`, or, unless `apply`, only report what would be done.

    Raises:
        CorruptError: a tag, or the manifest of a version to keep, cannot be read; or one of the
            store's folders is not a folder.
    """
    for key in folders_of(store):
        store.storage.list(key)
    collected = Collected()
    # abandoned work goes first, since deleting it needs no room for a mark
    for work, num_bytes in list(_abandoned(store, rule)):
        if not apply or _sweep(store, work):
            collected.work.append((work, num_bytes))
    # a version that is committed after this line is not looked at
    there = [ref for run in rule.runs_of(store) for ref in store.refs(run)]
    kept = find_kept(store, rule.keep, rule.moments, rule.spared)
    collected.marked = list(_not_kept(store, there, kept))
    with storage_errors("gc"):
        no_room = _mark_all(store, rule, collected.marked) if apply else None
        planned = ((expiring, 0.0) for expiring in collected.marked if not apply)
        marked = [*planned, *_marked(store, rule)]
        # what came into use before its mark is seen now; later users see the mark
        kept = find_kept(store, rule.keep, rule.moments, rule.spared)
        needed = {REMOVED: kept.in_use, EXPIRED: kept.versions, NO_OPTIMIZER: kept.read}
        for expiring in collected.marked if apply else ():
            # a tag was moved to it right before its mark
            if expiring.mark == EXPIRED and store.version(expiring.ref).mark is None:
                store.storage.delete(marks.key_of(expiring.ref, EXPIRED))
        new = set(collected.marked)
        for expiring, age in marked:
            is_due = age >= rule.grace_seconds and expiring.ref not in needed[expiring.mark]
            if is_due and apply:
                _delete_data(store, expiring.ref, expiring.mark)
            if is_due:
                collected.deleted.append(expiring)
            elif expiring not in new:
                collected.waiting.append(expiring)
        if no_room is not None and not collected.deleted:
            raise no_room
    return collected


def _not_kept(store: Store, refs: Iterable[Ref], kept: Kept) -> Iterator[Expiring]:
    """Yield what to mark of these versions."""
    for ref in refs:
        name = EXPIRED
        if ref in kept.versions:
            if ref.kind != "policy" or ref in kept.optimizer:
                continue
            name = NO_OPTIMIZER
        with suppress(CorruptError):  # damaged versions stay; `verify` reports them
            version = store.version(ref)
            num_bytes = sum(_data(store, ref, name).values())
            is_published = version.manifest.run_key in kept.run_keys
            is_marked = marks.read(store.storage, ref, name) is not None
            if not is_published and not is_marked and (num_bytes or name == EXPIRED):
                yield Expiring(ref, name, num_bytes)


def _mark_all(store: Store, rule: Rule, unmarked: Iterable[Expiring]) -> OSError | None:
    """Mark these data. Returns the error if the disk has no room for a mark: deleting what is due
    makes room."""
    for expiring in unmarked:
        ref, why, files = expiring.ref, f"gc, moments = {rule.moments}", {}
        try:
            with suppress(CorruptError):  # damaged versions stay; `verify` reports them
                if expiring.mark == EXPIRED:
                    why = f"gc, keep = {rule.keep}"
                    version = store.version(ref)
                    for name in set(_PLANNED_WITH).intersection(version.files.names):
                        files[name] = version.files.read(name).decode(errors="replace")
                marks.write(store.storage, ref, expiring.mark, why, files=files)
        except OSError as error:
            # a mark that exists now need not be durable: nothing may be deleted for it
            is_there = marks.read(store.storage, expiring.ref, expiring.mark) is not None
            if is_there or error.errno not in _NO_ROOM:
                raise
            return error
    return None


def _marked(store: Store, rule: Rule) -> Iterator[tuple[Expiring, float]]:
    """Yield the marked data that are still there, and the age of the mark in seconds."""
    for run, kind in store.kinds(rule.runs):
        listing = store.listing(run, kind)
        earlier: set[int] = set()
        for name in (REMOVED, EXPIRED, NO_OPTIMIZER):
            numbers = listing.marks[name] - earlier
            earlier |= numbers
            for number in sorted(numbers):
                ref = Ref(run, kind, number)
                num_bytes = 0
                # a link leads to what may be another store's
                with suppress(CorruptError):
                    num_bytes = sum(_data(store, ref, name).values())
                if num_bytes:
                    mark = None
                    with suppress(CorruptError):  # it deletes nothing; `verify` reports it
                        mark = marks.checked(store.storage, ref, name)
                    if mark is not None and not mark.keep:
                        yield Expiring(ref, name, num_bytes), mark.seconds


def _data(store: Store, ref: Ref, mark: str) -> dict[str, int]:
    """Return the bytes of the existing files and folders that a mark covers, by key."""
    prefix = Version(ref, store.storage).prefix
    covered = OPTIMIZER_FOLDER if mark == NO_OPTIMIZER else ""
    sizes: Counter[str] = Counter()
    for name, (size, _) in store.storage.files(prefix).items():
        # a folder that was half deleted has a longer name
        if name.startswith(covered) and name != "manifest.json":
            top, slash, _ = name.partition("/")
            sizes[f"{prefix}/{top}{slash}"] += size
    return sizes


def _delete_data(store: Store, ref: Ref, mark: str = REMOVED) -> None:
    """Delete the data that a mark covers, also if the manifest does not list them."""
    store.storage.delete(*_data(store, ref, mark))


def _abandoned(store: Store, rule: Rule) -> Iterator[tuple[Work, int]]:
    """Yield the work that no process holds a lease of, and that is done, or older than the grace
    time; and its bytes."""
    at_work = {stage.run_key for stage in stages_at_work(store)}
    for run, kind in store.kinds(rule.runs):
        summaries = store.listing(run, kind).summaries()
        num_made = Counter(summary.run_key for summary in summaries)
        names = [name for work in unfinished(store, run, kind) for name in work.names]
        # the manifest of a torn version cannot say which data are its own
        if not any(summary.error for summary in summaries):
            names += _unpublished(store, run, kind, num_made)
        for work in _by_repetition(run, kind, names):
            files = [entry for key in work.keys for entry in store.storage.files(key).values()]
            changed_at = max((at for _, at in files), default=0.0)
            is_old = time.time() - changed_at >= rule.grace_seconds
            is_done = num_made[work.run_key] > work.repetition
            if (is_done or is_old) and work.run_key not in at_work:
                yield work, sum(size for size, _ in files)


def _unpublished(store: Store, run: str, kind: str, num_made: Counter[str]) -> Iterator[str]:
    """Yield the names in `.data`, where a bucket keeps the data of versions, that no version
    names."""
    names = [f".data/{name}" for name in store.storage.list(f"{run}/{kind}/.data")]
    for work in _by_repetition(run, kind, names):
        # usually the only folder of finished work is its version's, which need not be read then
        if len(work.names) > 1 or num_made[work.run_key] <= work.repetition:
            published = _places(store, work)
            for name, key in zip(work.names, work.keys, strict=True):
                if key not in published:
                    yield name


def _sweep(store: Store, work: Work) -> bool:
    """Delete unfinished work. Returns False if a process has begun to work on it."""
    leases = Leases(store.storage, f"{work.prefix}.leases")
    with storage_errors(f"{work.run} unfinished work"):
        # a process that starts meanwhile waits for this lease, or finds it taken; if the disk has
        # no room for it, there is none for that process's lease either
        lease = None
        try:
            # a silent process of another host, or of another boot, is no holder here
            lease = leases.take("work", from_living=not leases.holders())
            is_free = lease is not None
        except OSError as error:
            is_free = error.errno in _NO_ROOM
            if not is_free:
                raise
        try:
            if not is_free or len(leases.holders()) > (lease is not None):
                return False
            in_bucket = any(name.startswith(".data/") for name in work.names)
            published = _places(store, work) if in_bucket else {}
            # notes before the shards that they describe
            keys = [key for key in reversed(work.keys) if key not in published]
            for key in keys:
                if not key.endswith(".leases"):
                    store.storage.delete(f"{key}/")
            # its process slept for the grace time, and published it at this moment
            for key, ref in _places(store, work).items() if in_bucket else ():
                if key in keys:
                    marks.write(store.storage, ref, REMOVED, "published after gc deleted its data")
            store.storage.delete(f"{leases.prefix}/")
        finally:
            if lease is not None:
                lease.release()
    return True


def _places(store: Store, work: Work) -> dict[str, Ref]:
    """Return the versions with this run key, marked ones too, by the prefix of their files."""
    listing = store.listing(work.run, work.kind)
    refs = (Ref(work.run, work.kind, number) for number in listing.find(work.run_key))
    return {Version(ref, store.storage).manifest.prefix: ref for ref in refs}
