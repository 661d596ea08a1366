"""The store as a reader sees it: immutable versions, each complete once it is published.

    STORE/store.json                         format, id
    STORE/<run>/<kind>/v000003/              manifest.json + part-00000-3fa9c1d2.arrow …
    STORE/<run>/<kind>/v000003.expired       a mark: its data may be deleted; flows count it as done
    STORE/<run>/<kind>/v000003.removed       a mark: its data may be deleted; it counts as not done
    STORE/<run>/<kind>/v000003.expired.optimizer    a mark for its optimizer state alone
    STORE/<run>/<kind>/.work/                unfinished work (see `writer`)
    STORE/<run>/<kind>/.data/                in a bucket, the files of versions (see `bucket`)
    STORE/<run>/<kind>/.index                a cache of all manifests (see `listing`)
    STORE/<run>/tags/<name>/000001.json      entries of a tag; the highest is the tag

Three rules hold. Objects are written once and never changed; the exceptions are unfinished work,
leases, caches and marks that are taken back. A version is its manifest: it exists as soon as its
manifest does. Of a version only data are deleted, never the manifest, and a mark says so first.

Reading checks size and sha256 before it parses, and maps files into memory. There are no silent
fallbacks: if the newest version is torn, `latest` is an error. Of a version that expired, only the
manifest and small files that plans need can be read; one that was removed is not opened.

`quiver gc` marks a version first, and deletes its data after a grace time, 24 hours by default. A
process that opened the version before reads on until then; after it, reading is a LineageError
with code E-EXPIRED, which says how to make the version again. Writing is in `writer`, deleting in
`retention`.

    store = Store("store")
    rollouts = store.open("arith/rollouts@latest")
    rollouts.manifest.metrics
    rollouts.table()
    rollouts.to_datasets()
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quiver.schemas import cells, metrics, refs
from quiver.schemas.errors import (
    ConfigError,
    CorruptError,
    LineageError,
    QuiverError,
    did_you_mean,
    printable,
    quoted_name,
    reason,
)
from quiver.schemas.manifest import FORMAT, FileEntry, Manifest, from_json
from quiver.schemas.plain import read_json
from quiver.schemas.refs import Ref
from quiver.stages.core.files import storage_errors
from quiver.stages.core.threads import map_in_threads

from . import marks
from .listing import EXPIRED, NO_OPTIMIZER, REMOVED, Listing, Summary
from .marks import Mark
from .places import locate, open_storage
from .storage import Storage, read_table, size_and_sha256, use_local
from .tags import Entry, Tag, check_name, is_name

if TYPE_CHECKING:
    import datasets

log = logging.getLogger(__name__)


OPTIMIZER_FOLDER = "optimizer"
"""Folder of a policy's optimizer state, which may be deleted before the other files."""


def schema_module(kind: str):
    """Return the module of `schemas` that describes `kind`, which must be a table."""
    return importlib.import_module(f"quiver.schemas.{kind}")


class VersionFiles:
    """The files of one version, for libraries that read files: weights, tokenizer."""

    def __init__(self, version: Version, storage: Storage) -> None:
        self._version = version
        self._storage = storage

    @property
    def _prefix(self) -> str:
        return self._version.manifest.prefix

    @property
    def folder(self) -> Path:
        """Folder on this host with all files but optimizer state. Nothing in it may be changed."""
        names = [name for name in self.names if not name.startswith(f"{OPTIMIZER_FOLDER}/")]
        try:
            return use_local(self._storage, self._prefix, Path, names)
        except FileNotFoundError:
            raise self._version.missing("") from None

    @property
    def names(self) -> list[str]:
        """Names below the folder, as the manifest lists them."""
        return [entry.name for entry in self._version.manifest.files]

    def path(self, name: str) -> Path:
        """Return the path of a file on this host. It is not checked: see `Version.verify`."""
        return use_local(self._storage, f"{self._prefix}/{name}", Path)

    def read(self, name: str) -> bytes:
        """Return all bytes of a file, checked."""
        mark = self._version.mark
        if mark is not None and name in mark.files:
            return mark.files[name].encode()
        self._version.verify(name)
        try:
            return use_local(self._storage, f"{self._prefix}/{name}", Path.read_bytes)
        except FileNotFoundError:
            raise self._version.missing(name) from None

    def sizes(self) -> dict[str, int]:
        """Return the actual size in bytes of each existing file, listed or not, by name, without
        files that gc is deleting, in `….gone` (see `disk`)."""
        files = self._storage.files(self._prefix)
        return {name: size for name, (size, _) in files.items() if ".gone/" not in name}


class Version:
    """One immutable version: reference, manifest, and data that is checked before it is parsed."""

    def __init__(self, ref: Ref, storage: Storage, mark: Mark | None = None) -> None:
        self.ref = ref
        self.files = VersionFiles(self, storage)
        self.mark = mark
        """Set if it expired: only its manifest and the files kept in the mark can be read."""
        self._storage = storage
        self._checked: set[str] = set()

    def __repr__(self) -> str:
        return f"Version({str(self.ref)!r})"

    @property
    def prefix(self) -> str:
        """Prefix of its files in the store; its manifest's prefix if the manifest is torn."""
        with suppress(CorruptError):
            return self.manifest.prefix
        return self.ref.folder

    @cached_property
    def manifest(self) -> Manifest:
        """The version's manifest. Raises CorruptError if it is torn or belongs elsewhere."""
        try:
            raw = self._storage.read(f"{self.ref.folder}/manifest.json")
        except FileNotFoundError:
            raise self.corrupt("manifest.json", "is missing") from None
        manifest = from_json(raw, str(self.ref))
        if manifest.ref != str(self.ref):
            raise self.corrupt("manifest.json", f"expected {self.ref}, found {manifest.ref}")
        kind = self.ref.kind
        names = ["policy/1"] if kind == "policy" else list(schema_module(kind).SCHEMAS)
        if manifest.kind_schema not in names:
            problem = f"schema {printable(manifest.kind_schema)}, expected {' or '.join(names)}"
            raise self.corrupt("manifest.json", problem)
        problem = metrics.problem(kind, manifest.metrics)
        if problem:
            raise self.corrupt("manifest.json", f"metrics.{problem}")
        return manifest

    def verify(self, *names: str) -> None:
        """Check size and sha256 of files, each once per process.

        A large file of given `names` is not read again if this host has hashed it, when it wrote or
        checked it, and the file looks unchanged since.

        Args:
            names: files, or, if they end in a slash, all files below them. Without names, all
                bytes of all files are read; optimizer state that expired alone is left out.

        Raises:
            CorruptError: a file is missing or differs from what was written.
            LineageError: the file expired, or the version was deleted since it was opened.
        """
        folders = tuple(name for name in names if name.endswith("/"))
        unchecked = [
            entry
            for entry in self.manifest.files
            if not names or entry.name in names or entry.name.startswith(folders)
            if entry.name not in self._checked
        ]
        of_optimizer = [
            entry for entry in unchecked if entry.name.startswith(f"{OPTIMIZER_FOLDER}/")
        ]
        if unchecked:
            # a mark covers all optimizer state or none of it, so one file of it stands for all
            asked_about = (of_optimizer or unchecked)[0]
            try:
                self.require(asked_about.name)
            except LineageError:
                if names or self.mark:
                    raise
                # the optimizer state alone expired, and it was not asked for by name
                unchecked = [entry for entry in unchecked if entry not in of_optimizer]
        self._verify_files(unchecked, remembered=bool(names))

    def require(self, name: str) -> None:
        """Raise LineageError if file `name` expired, or, if empty, the whole version. `verify`
        checks the file itself."""
        names = [EXPIRED] if self.mark else []
        if name.startswith(f"{OPTIMIZER_FOLDER}/"):
            names.append(NO_OPTIMIZER)
        error = marks.gone_error(self._storage, self.ref, names)
        if error is not None:
            raise error

    def _verify_files(self, entries: list[FileEntry], *, remembered: bool = True) -> None:
        if len(entries) > 1:
            with suppress(FileNotFoundError):  # an error of its own for each file below
                names = [entry.name for entry in entries]
                self._storage.local(self.manifest.prefix, names)  # all at once
        map_in_threads(partial(self._verify_file, remembered=remembered), entries)

    def _verify_file(self, entry: FileEntry, *, remembered: bool) -> None:
        name = entry.name
        key = f"{self.manifest.prefix}/{name}"
        try:
            size, sha256 = size_and_sha256(
                self._storage, key, (entry.bytes, entry.sha256), remembered=remembered
            )
        except FileNotFoundError:
            raise self.missing(name) from None
        if size != entry.bytes:
            raise self.corrupt(name, f"expected {entry.bytes} bytes, found {size}")
        if sha256 != entry.sha256:
            raise self.corrupt(name, f"sha256 expected {entry.sha256[:12]}…, found {sha256[:12]}…")
        self._checked.add(name)

    def missing(self, name: str) -> QuiverError:
        """Build the error for a file that is missing; it may have expired since the version was
        opened."""
        error = marks.gone_error(self._storage, self.ref, (REMOVED, EXPIRED))
        return error or self.corrupt(name, "is missing")

    def corrupt(self, name: str, problem: str) -> CorruptError:
        """Build the error for a file of this version that differs from what was written."""
        return CorruptError(
            f"{self.ref} {name}",
            problem,
            state="other versions are not touched by this; nothing was changed.",
            next=f"quiver verify {self.ref}",
        )

    def table(self, columns: list[str] | None = None) -> pa.Table:
        """Return all rows in order, with the kind's schema, mapped into memory uncopied."""
        return self.head(columns, sum(entry.bytes for entry in self.manifest.files))

    def head(self, columns: list[str] | None, most_bytes: int) -> pa.Table:
        """Return columns of the first shards, checked, then mapped into memory.

        Args:
            columns: names of the columns. None: all.
            most_bytes: shards are added until they exceed this; the first one always counts.
        """
        entries: list[FileEntry] = []
        for entry in self.manifest.files:
            most_bytes -= entry.bytes
            if entries and most_bytes < 0:
                break
            entries.append(entry)
        self.require("")
        self._verify_files([entry for entry in entries if entry.name not in self._checked])
        if self._storage.is_foreign:
            from .arrow_check import require_parseable

            require_parseable(self.files.folder, entries, self.corrupt)
        shards = [self._read_shard(entry, columns) for entry in entries]
        try:
            return pa.concat_tables(shards)
        except pa.ArrowException as error:
            raise self.corrupt("", f"its files do not fit together: {printable(error)}") from None

    def _read_shard(self, entry: FileEntry, columns: list[str] | None) -> pa.Table:
        """Read one file that was verified."""
        try:
            shard = read_table(self._storage, f"{self.manifest.prefix}/{entry.name}")
            self._require_columns(columns or [], shard.column_names)
            shard = shard.select(columns) if columns else shard
        except QuiverError:
            raise
        except FileNotFoundError:
            raise self.missing(entry.name) from None
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise self.corrupt(entry.name, f"cannot be parsed: {printable(error)}") from None
        if shard.num_rows != entry.rows:
            raise self.corrupt(entry.name, f"expected {entry.rows} rows, found {shard.num_rows}")
        return shard

    def _require_columns(self, asked: list[str], names: list[str]) -> None:
        """Raise ConfigError for a column that neither the file nor the kind has."""
        columns = {*names, *schema_module(self.ref.kind).SCHEMA.names}
        for name in asked:
            if name not in columns:
                listed = f"; it has {', '.join(names)}"
                raise ConfigError(
                    str(self.ref),
                    f"has no column {quoted_name(name)}{did_you_mean(name, names, listed)}",
                    next="correct the name",
                )

    def to_datasets(self) -> datasets.Dataset:
        """Return the same rows as a `datasets.Dataset` over the mapped files, without a copy.

        Cells of JSON are its text, and maps are lists of their keys and values.
        """
        import datasets
        from datasets.table import InMemoryTable

        table = cells.stored(self.table()).replace_schema_metadata(None)
        return datasets.Dataset(InMemoryTable(table))


class Store:
    """A folder of versions, or a bucket.

    `written` holds the references that this object committed; other versions existed before, or
    were committed by other processes.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = True) -> None:
        self.written: set[str] = set()
        self.sees_expired = False
        try:
            self.url = locate(path)
            self.url.encode()
            self.storage = open_storage(self.url)
            try:
                self.id = self._read_marker()
            except FileNotFoundError:
                self._create(create)
                self.id = self._read_marker()
        except QuiverError:
            raise
        # RuntimeError: an unknown home, or a loop of links
        except (OSError, RuntimeError, UnicodeError) as error:
            raise ConfigError(
                f"store {printable(path)}",
                f"cannot be used: {reason(error)}",
                next="name another folder in --store",
            ) from None

    def _create(self, may_create: bool) -> None:
        if not may_create:
            raise ConfigError(
                f"store {self.url}",
                "there is no store here",
                next="give --store PATH, or run a recipe first",
            )
        if any(not name.startswith("store.json") for name in self.storage.list("")):
            raise ConfigError(
                f"store {self.url}",
                "the folder holds other things",
                next="name an empty or new folder",
            )
        with storage_errors(f"store {self.url}"):
            self.storage.put_if_absent("store.json", _marker().encode(), flush_name=True)
            if self.storage.put_if_absent("store.json", b"again"):
                raise ConfigError(
                    f"store {self.url}",
                    "the bucket's server overwrites objects in spite of If-None-Match",
                    next="take a server that supports conditional writes",
                )

    def _read_marker(self) -> str:
        """Return the id in store.json. Raises CorruptError."""
        try:
            fields = read_json(self.storage.read("store.json"))
            format = fields["format"]
        except (ValueError, KeyError, TypeError):
            raise CorruptError(
                f"store {self.url}",
                "store.json cannot be read",
                next=f"write {_marker()} into {self.url}/store.json, the versions need no more",
            ) from None
        if format != FORMAT:
            raise CorruptError(
                f"store {self.url}",
                f"store.json has format {printable(format)}, expected {FORMAT}",
                next="take the Quiver that wrote it, or name another folder in --store",
            )
        return fields.get("id", "")

    # -- reading

    def with_expired(self) -> Store:
        """Return the same store with expired versions visible.

        Their manifests and the small files that plans need can be read; reading other files raises
        LineageError.
        """
        store = copy.copy(self)
        store.sees_expired = True
        return store

    def runs(self) -> list[str]:
        """Return the names of all runs, sorted."""
        names = []
        for name in self.storage.list(""):
            # what is no run: a file, a link, a folder with a name that no run has
            with suppress(ConfigError, CorruptError):
                if self.storage.list(refs.check_name(name, "run")):
                    names.append(name)
        return names

    def kinds(self, runs: Iterable[str] | None = None) -> Iterator[tuple[str, str]]:
        """Yield each of these runs, or of all, with every kind that it has a folder of."""
        names = self.runs() if runs is None else [refs.check_name(run, "run") for run in runs]
        for run in names:
            folders = self.storage.list(run)
            yield from ((run, kind) for kind in refs.KINDS if kind in folders)

    def numbers(self, run: str, kind: str) -> list[int]:
        """Return the version numbers of one kind in one run, oldest first. A version that was made
        again is sorted where its first one was, so the last number need not be the highest."""
        return self.listing(run, kind).visible(expired=self.sees_expired)

    def listing(self, run: str, kind: str) -> Listing:
        """List the versions of one kind in one run, and what of them is marked."""
        return Listing(self.storage, refs.check_name(run, "run"), kind)

    def refs(self, run: str | None = None, kind: str | None = None) -> Iterator[Ref]:
        """Yield references of all visible versions, by run, kind and number."""
        places = [(run, kind)] if run and kind else self.kinds([run] if run else None)
        for name, one_kind in places:
            if kind in (None, one_kind):
                yield from (Ref(name, one_kind, number) for number in self.numbers(name, one_kind))

    def versions(self, run: str | None = None, kind: str | None = None) -> Iterator[Version]:
        """Yield every visible version, by run, kind and number."""
        return map(self.version, self.refs(run, kind))

    def summaries(self, run: str, kind: str) -> list[tuple[Ref, Summary]]:
        """Return the summary of every visible version of one kind in one run, by number."""
        listing = self.listing(run, kind)
        numbers = set(listing.visible(expired=self.sees_expired))
        return [
            (Ref(run, kind, summary.number), summary)
            for summary in listing.summaries()
            if summary.number in numbers
        ]

    def resolve(self, ref: str | Ref, run: str | None = None) -> Ref:
        """Return the reference with its number.

        `latest` is the newest version that no sweep made, or the newest if sweeps made all; a tag
        stands for the version it points at. A reference to a version that expired or was removed
        gives its repeat with the same content, if there is one.

        Raises:
            LineageError: there is no such version, its data expired, or the tag's version was
                replaced by another one.
        """
        parsed = refs.parse(ref, run)
        if isinstance(parsed.version, int):
            error = marks.gone_error(self.storage, parsed, [REMOVED])
            if error is None and not self.sees_expired and self._expired(parsed):
                error = marks.gone_error(self.storage, parsed, [EXPIRED])
            if error is not None:
                repeat = self._repeat_of(parsed)
                if repeat is None:
                    raise error
                return repeat
            if (
                not self.has_manifest(parsed)
                and parsed.version not in self.listing(parsed.run, parsed.kind).numbers
            ):
                raise self._nowhere(parsed, "there is no such version")
            return parsed
        if parsed.version == "latest":
            listing = self.listing(parsed.run, parsed.kind)
            numbers = listing.visible(expired=self.sees_expired)
            if not numbers:
                raise self._nowhere(parsed, f"run {parsed.run} has no {parsed.kind} yet")
            return parsed._replace(version=listing.newest_not_of_sweep(numbers))
        entry = self._tag(parsed.run, parsed.version).newest()
        if entry is None:
            others = ", ".join(self.tag_names(parsed.run))
            problem = f"run {parsed.run} has no tag {parsed.version}"
            raise self._nowhere(parsed, f"{problem}, only {others}" if others else problem)
        tagged = refs.parse(entry.ref)
        if tagged.kind != parsed.kind:
            raise self._nowhere(parsed, f"tag {parsed.version} points at {tagged}")
        target = self.resolve(tagged)
        if entry.content_hash not in ("", self.version(target).manifest.content_hash):
            problem = f"tag {parsed.version} pointed at an earlier {target}, which was replaced"
            raise self._nowhere(parsed, problem)
        return target

    def _expired(self, ref: Ref) -> Mark | None:
        """Return the mark of a version that expired.

        If a tag points at it, it did not expire, and its data stay: the tag was moved to it right
        before the mark. gc looks for tags again after it made a mark, and takes this one back.
        """
        mark = marks.read(self.storage, ref, EXPIRED)
        if mark and any(self.tagged(ref.run, name) == str(ref) for name in self.tag_names(ref.run)):
            return None
        return mark

    def _repeat_of(self, ref: Ref) -> Ref | None:
        """Return the version that the same work made again, with the same content, after this one
        expired or was removed. None if there is none."""
        try:
            manifest = Version(ref, self.storage).manifest
        except CorruptError:
            return None
        listing = self.listing(ref.run, ref.kind)
        visible = set(listing.visible(expired=False))
        for number in filter(visible.__contains__, reversed(listing.find(manifest.run_key))):
            other = Version(Ref(ref.run, ref.kind, number), self.storage)
            with suppress(CorruptError):
                if other.manifest.content_hash == manifest.content_hash:
                    return other.ref
        return None

    def open(self, ref: str | Ref, run: str | None = None) -> Version:
        """Return the version that `ref` names, its manifest checked.

        Raises LineageError or CorruptError.
        """
        resolved = self.resolve(ref, run)
        # without `sees_expired`, `resolve` refuses what expired
        mark = self._expired(resolved) if self.sees_expired else None
        version = Version(resolved, self.storage, mark)
        version.manifest  # noqa: B018  a torn manifest is found here, not later
        return version

    def find(
        self, run: str, kind: str, run_key: str, *, skip: int = 0, listing: Listing | None = None
    ) -> Version | None:
        """Return the newest version with this run key, or None.

        A removed version is never returned, and an expired one only by a store with
        `sees_expired`, if there is no other. A version with a torn manifest is skipped with a
        warning.

        Args:
            skip: ignore this many versions with this run key, the oldest ones.
            listing: an earlier listing to search. Default: a new one.
        """
        listing = listing or self.listing(run, kind)
        numbers = set(listing.find(run_key)[skip:])
        if numbers:
            numbers.intersection_update(listing.visible(expired=self.sees_expired))
        expired = listing.marks[EXPIRED]
        # those with data are tried first, the newest first
        for number in sorted(numbers, key=lambda number: (number in expired, -number)):
            ref = Ref(run, kind, number)
            version = self.version(ref) if number in expired else Version(ref, self.storage)
            try:
                if version.manifest.run_key == run_key:
                    return version
            except CorruptError as error:
                log.warning("%s is passed over: %s", version.ref, error.message)
        return None

    def version(self, ref: Ref) -> Version:
        """Return the version with this number, which may be torn or expired. Raises
        CorruptError."""
        return Version(ref, self.storage, self._expired(ref))

    def exists(self, ref: Ref) -> bool:
        """Return True if the version, or its repeat, is visible, torn or whole. Raises
        CorruptError."""
        try:
            self.resolve(ref)
        except LineageError:
            return False
        return True

    def has_manifest(self, ref: Ref) -> bool:
        """Return True if a version's manifest exists, even if it has marks."""
        try:
            self.storage.read(f"{ref.folder}/manifest.json")
        except FileNotFoundError:
            return False
        except CorruptError:
            pass  # `Version.manifest` says what is wrong
        return True

    def _nowhere(self, ref: Ref, why: str) -> LineageError:
        run = ref.run if ref.run in self.runs() else None
        names = [str(known_ref) for known_ref in self.refs(run, ref.kind)]
        there_are = f"; there are {', '.join(names[-5:])}" if names else ""
        next = "quiver ls" if any(self.refs()) else "run a recipe with this store first"
        return LineageError(str(ref), why + there_are, next=next)

    # -- tags

    def _tag(self, run: str, name: str) -> Tag:
        return Tag(self.storage, refs.check_name(run, "run"), check_name(name))

    def tag(
        self,
        run: str,
        name: str,
        ref: str | Ref,
        expected: str | None = "*",
        *,
        why: str = "",
        key: str = "",
        about: dict[str, Any] | None = None,
    ) -> Ref:
        """Point tag `name` of `run` at `ref`, and record the decision in its history.

        Args:
            expected: the reference the tag must hold now; "*" accepts any.
            why: the reason, for people.
            key: identifies the decision. If an entry with this key exists, nothing is done: a
                decision is made once. With a key, a tag that stays gets an entry too.
            about: the data the decision was based on.

        Raises:
            ConflictError: the tag does not hold `expected`.
            ConfigError: it holds a version of another kind, or `ref` is of another run.
            CorruptError: the version's manifest is torn.
        """
        tag = self._tag(run, name)
        target = self.resolve(ref, run)
        if target.run != run:
            raise ConfigError(
                f"tag {run}/{name}",
                f"cannot point at {target}, a version of another run",
                next=f"quiver tag {name} {target}",
            )
        content_hash = self.version(target).manifest.content_hash
        with storage_errors(f"{run} tag {name}"):
            entry = tag.move(str(target), content_hash, expected, why, key, about or {})
            error = marks.gone_error(self.storage, target, (REMOVED, EXPIRED)) if entry else None
            if error is not None:
                # a collection marked it meanwhile, and may not have seen the entry
                tag.undo(entry)
                raise error
        return target

    def tagged(self, run: str, name: str) -> str | None:
        """Return the reference that tag `name` of `run` holds; None if there is no such tag.

        Raises CorruptError.
        """
        entry = self._tag(run, name).newest()
        return entry.ref if entry else None

    def tag_names(self, run: str) -> list[str]:
        """Return the names of all tags of `run`, sorted."""
        return [name for name in self.storage.list(f"{run}/tags") if is_name(name)]

    def history(self, run: str, name: str) -> list[Entry]:
        """Return the history of tag `name` of `run`, oldest first; empty if it never moved.

        Raises CorruptError.
        """
        return self._tag(run, name).history()


def _marker() -> str:
    return json.dumps({"format": FORMAT, "id": str(uuid.uuid4())})
