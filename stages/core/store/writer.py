"""Writing versions: staged shard by shard under a lease, then published at once.

    with open_staging(plan) as staging:
        if staging.committed:
            return staging.committed                      # another process has finished it
        writer = staging.writers["rewards"]
        for index in writer.take_shards(count):    # a restart skips finished shards
            writer.write(index, table)
        writer.finish(metrics={...})
        return staging.publish()

Contents of `STORE/<run>/<kind>/.staging/` until the work is done:

    KEY/                 shards
    KEY.notes/           a note that makes each shard count, and each process's report
    KEY.leases/          which processes are at work (see `leases`)
    KEY.resume/          state from which a killed stage resumes
    KEY.<worker>/        candidate: links to the shards, or a policy's files, and the manifest;
                         this folder is renamed to publish it

The commit: shards are written, hashed and flushed one by one, each with a note that makes it count.
Then a folder of links to them gets its manifest, flushed, and is renamed to the next number. If the
number is taken, the rename fails and the process tries the next one. The parent folder is flushed,
and only then is the version acknowledged.

A version appears once, even if a process slept while another took over. A process checks its lease
after its candidate is complete, right before the rename. A process that takes over creates the next
number of the lease, removes the candidates of others, and then looks for the version: a later
rename finds no folder, and writing another file into the removed candidate fails. A shard that the
sleeping process wrote since is found by its hash: after a takeover the links are hashed again.
"""

from __future__ import annotations

import errno
import logging
import math
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    CorruptError,
    OutcomeUnknownError,
    printable,
)
from quiver.schemas.fields import kind_of
from quiver.schemas.manifest import (
    FileEntry,
    Manifest,
    ModelEntry,
    content_hash,
)
from quiver.schemas.refs import Ref, as_version
from quiver.stages.core.store.plan import Plan
from quiver.stages.core.threads import map_in_threads

from .environment import environment
from .leases import Lease, Leases, Link
from .ledger import Ledger
from .notes import (
    KEPT_SUFFIXES,
    SHARD_NOTE,
    SOURCES,
    make_folder,
    note_of,
    read_note,
    shard_name,
    summed_seconds,
)
from .reserve import keep_reserve
from .sharing import CommittedByOther, SharedShards, SoleShards
from .storage import error_number, storage_errors
from .trash import rescue
from .versions import Version, schema_module

ROWS_PER_SHARD = 256
"""Rows per shard for work that is saved as it goes. A crash costs a process its unfinished shards:
usually one; in generate about two, or more if its engine decodes more rows at once."""
ROWS_AT_ONCE = 2048
"""Rows per shard when the whole table is in memory. It is larger, because each shard costs two
flushes: of its file, and of its note."""
_JOIN_SECONDS = 10.0
log = logging.getLogger(__name__)


class Writer:
    """Stages and commits one version of one kind."""

    def __init__(self, plan: Plan, kind: str, worker: str, *, force: bool) -> None:
        self.kind = kind
        self.run = plan.run
        self.run_key = plan.run_key
        self.seconds: dict[str, float] = {}
        """Seconds by phase, in this process."""
        self.notes: dict[str, Any] = {}
        """Fields that the stage adds to its report, as plain JSON. Set them before a shard is
        written: the committing process sees only what was noted by then.
        """
        self.committed: Version | None = None
        """The version, once it is committed."""
        self.shards: SoleShards | SharedShards | None = None
        self._plan = plan
        self._force = force
        self._name = f"{plan.run}/{kind}"
        self._storage = plan.store.storage
        self._prefix = f"{self._name}/.staging/{plan.run_key}"
        self._worker = worker
        self._candidate = f"{self._prefix}.{worker}"
        # libraries write a policy's files in place, so a process that slept must not share the
        # folder
        self._files_prefix = self._candidate if kind == "policy" else self._prefix
        self._count: int | None = None
        self._started_at = time.monotonic()
        self._entries: tuple[FileEntry, ...] = ()
        self._schema_name = "policy/1"
        self._finished: dict[str, Any] | None = None
        self._ids: pa.ChunkedArray | None = None
        # with force, existing versions do not count as finished work
        numbers = plan.store.numbers(plan.run, kind) if force else []
        self._ignored_up_to = max(numbers, default=-1)

    # -- the staging place

    @property
    def folder(self) -> Path:
        """Folder on this host for a policy's files; its final contents are published."""
        return self._storage.path(self._files_prefix)

    def prepare(self, *, fresh: bool) -> None:
        """Make the staging folders. With `fresh`, delete the work of an earlier attempt."""
        with storage_errors(self._name):
            if self._force:
                self._storage.delete_tree(f"{self._prefix}.resume")
            # notes first: no note may exist without its shard
            for prefix in (f"{self._prefix}.notes", self._files_prefix):
                if fresh:
                    self._storage.delete_tree(prefix)
                make_folder(self._storage, prefix)

    def remove_candidates(self) -> None:
        """Remove the other processes' candidates, so that only this process can publish."""
        staging, _, run_key = self._prefix.rpartition("/")
        for name in self._storage.list(staging):
            if name.startswith(f"{run_key}.") and not name.endswith(
                (*KEPT_SUFFIXES, f".{self._worker}")
            ):
                self._storage.delete_tree(f"{staging}/{name}")

    def is_committed(self) -> bool:
        """Return True if the version exists by now, and then set `committed`."""
        if self.committed is None:
            self.committed = self._plan.store.find(
                self.run, self.kind, self.run_key, self._ignored_up_to
            )
        return self.committed is not None

    def stop_if_committed(self) -> None:
        """Raise CommittedByOther if another process has committed the version."""
        if self.is_committed():
            raise CommittedByOther

    # -- shards

    def take_shards(self, count: int) -> Iterator[int]:
        """Yield the indices, out of `count` shards, that this process is to write."""
        return iter(self.shards_of(count))

    def shards_of(self, count: int) -> SoleShards | SharedShards:
        """Start handing out `count` shards, and return the allocation."""
        self._count = count
        self.shards.begin(count)
        return self.shards

    def rows_per_shard(self, rows: int) -> int:
        """Return the rows per shard: `rows`, unless existing shards were begun with another number.

        Those may come from an earlier attempt or from another process.
        """
        fields = {"rows_per_shard": rows}
        with storage_errors(self._name):
            noted = self.noted()
            if self.shards.is_sole and not noted:
                self.delete_note("plan")  # nothing is finished, so nothing binds
            elif self.read_note("plan") is None:
                for index in noted:  # the row count is unknown
                    self.drop(index)
            self._storage.put_if_absent(f"{self._prefix}.notes/plan", note_of(fields))
            begun_with = self.read_note("plan")
            if begun_with is None:  # torn
                self.write_note("plan", fields)
            return (begun_with or fields)["rows_per_shard"]

    def has(self, index: int) -> bool:
        """Return True if shard `index` is finished and unchanged."""
        entry = self._note(index)
        try:
            return entry is not None and entry == self._entry(entry.name, entry.rows)
        except (FileNotFoundError, CorruptError):
            return False

    def noted(self) -> list[int]:
        """Return the indices of the finished shards, by any process, rising."""
        matches = map(SHARD_NOTE.fullmatch, self.note_names())
        return sorted(int(match[1]) for match in matches if match)

    def note_names(self) -> list[str]:
        """Return the names of all notes."""
        return self._storage.list(f"{self._prefix}.notes")

    def read_note(self, name: str) -> dict[str, Any] | None:
        """Read a note. Returns None if it is missing or damaged."""
        return read_note(self._storage, f"{self._prefix}.notes/{name}")

    def write_note(self, name: str, fields: dict[str, Any]) -> None:
        """Write a note beside the shards."""
        self._storage.write(f"{self._prefix}.notes/{name}", note_of(fields))

    def delete_note(self, name: str) -> None:
        """Delete a note."""
        self._storage.delete(f"{self._prefix}.notes/{name}")

    def read(self, index: int) -> pa.Table:
        """Return a finished shard."""
        return self._storage.read_table(f"{self._prefix}/{shard_name(index)}")

    def drop(self, index: int) -> None:
        """Discard shard `index`, so that it is written again."""
        name = shard_name(index)
        self.delete_note(f"{name}.json")
        self._storage.delete(f"{self._prefix}/{name}")

    def write(self, index: int, table: pa.Table) -> None:
        """Write shard `index`, flushed, then a note that makes it count.

        If another process has finished the shard already, its copy stays.

        Args:
            table: the shard's rows, in order.

        Raises:
            SchemaError: the table does not fit the kind.
        """
        kind_schema = schema_module(self.kind).check(table)
        name = shard_name(index)
        with storage_errors(f"{self._name} {name}"):
            rows = table.replace_schema_metadata(kind_schema.metadata).combine_chunks()
            entry = self._write_shard(index, rows)
            self.write_note(f"{name}.json", entry.model_dump(mode="json"))
            self.shards.written(index)

    def write_table(self, table: pa.Table) -> None:
        """Write all rows in shards of ROWS_AT_ONCE; an empty table makes one empty shard.

        Raises SchemaError.
        """
        rows = self.rows_per_shard(ROWS_AT_ONCE)
        for index in self.take_shards(max(1, math.ceil(len(table) / rows))):
            self.write(index, table.slice(index * rows, rows))

    def _write_shard(self, index: int, table: pa.Table) -> FileEntry:
        name = shard_name(index)
        key = f"{self._prefix}/{name}"
        try:
            with (
                self._storage.create(key, if_absent=not self.shards.is_sole) as file,
                pa.ipc.new_file(pa.PythonFile(file, "w"), table.schema) as arrow,
            ):
                arrow.write_table(table)
        except (FileExistsError, CorruptError):
            if self.has(index):
                return self._note(index)  # another process wrote it first
            # no note: its writer died first, and its bytes count only if they equal ours
            with suppress(FileNotFoundError, CorruptError):
                if self._storage.sha256(key) == file.sha.hexdigest():
                    return self._entry(name, table.num_rows)
            self._storage.delete(key)
            return self._write_shard(index, table)
        return FileEntry(
            name=name, bytes=file.bytes, sha256=file.sha.hexdigest(), rows=table.num_rows
        )

    def _entry(self, name: str, rows: int = 0) -> FileEntry:
        """Hash a staged file and return its manifest entry."""
        key = f"{self._files_prefix}/{name}"
        size = self._storage.size(key)
        return FileEntry(name=name, bytes=size, sha256=self._storage.sha256(key), rows=rows)

    def _note(self, index: int) -> FileEntry | None:
        """Return the entry in a shard's note, or None if it is missing or damaged."""
        name = shard_name(index)
        fields = self.read_note(f"{name}.json")
        is_its = fields is not None and fields["name"] == name
        return FileEntry.model_validate(fields) if is_its else None

    # -- what the manifest will say

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `seconds[name]` of the manifest."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started_at

    def report(self) -> dict[str, Any]:
        """Return this process's report: `notes`, the `seconds` of its phases, its shards."""
        total = time.monotonic() - self._started_at
        return {**self.notes, "seconds": {**self.seconds, "total": total}, **self.shards.report()}

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports of all processes that took part, this one first."""
        return [self.report(), *self.shards.other_reports()]

    def finish(
        self,
        *,
        metrics: dict[str, Any] | None = None,
        status: dict[str, int] | None = None,
        models: tuple[ModelEntry, ...] | None = None,
        device: str = "cpu",
        ids: pa.ChunkedArray | None = None,
    ) -> None:
        """Declare all data written, and give the remaining fields of the manifest.

        Args:
            status: rows by outcome.
            models: replaces the plan's models. Default: the plan's.
            ids: what the column rollout_id must hold. None: not checked.
        """
        self._ids = ids
        self._finished = {
            "metrics": metrics or {},
            "status": status or {},
            "environment": {**environment(), "device": device},
            **({"models": models} if models is not None else {}),
        }

    def seal(self) -> None:
        """Check that the staged data is complete; nothing may be written afterwards.

        A policy's files are flushed and hashed here. A table's shards were flushed and hashed when
        they were written; they are read back, and their numbers, ids and schema are checked.

        Raises:
            CorruptError: shards are not numbered 0 to n − 1, so some are missing, or rows are not
                the ones that were asked for. The staged data is discarded.
        """
        if self._finished is None:
            raise RuntimeError(f"{self._name}: the stage has not finished its writer")
        with self.phase("commit"), storage_errors(self._name):
            if self.kind == "policy":
                names = self._storage.list_files(self._files_prefix)
                for name in names:
                    self._storage.settle(f"{self._files_prefix}/{name}")
                self._entries = tuple(map_in_threads(self._entry, names))
                return
            indices = self.noted()
            self._entries = tuple(map(self._note, indices))
            count = len(indices) if self._count is None else self._count
            problem = None
            if indices != list(range(count)) or None in self._entries:
                problem = f"shards {[*map(shard_name, indices)]} are not one row of numbers"
            else:
                table = pa.concat_tables(map(self.read, indices))
                if self._ids is not None and self._ids != table["rollout_id"]:
                    problem = "its rows are not those that were asked for"
            if problem:
                self.prepare(fresh=True)
                raise CorruptError(
                    self._name,
                    problem,
                    state="what was staged of it is thrown away; all versions are intact.",
                    next="run the same command again",
                )
            self._schema_name = kind_of(schema_module(self.kind).check(table))

    def publish(self, lease: Lease, metrics: dict[str, Any]) -> None:
        """Make the version visible under the next number, and set `committed`.

        Raises:
            ConflictError: the plan allows one number only, and it is taken.
            BusyError: another process took over the lease.
        """
        plan = self._plan
        schema = self._schema_name
        fields = {
            **plan.manifest_fields(),
            **self._finished,
            "metrics": {**self._finished["metrics"], **metrics},
            "kind_schema": schema,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "commit_id": str(uuid.uuid4()),
            "files": self._entries,
            "rows": sum(entry.rows for entry in self._entries),
            "content_hash": content_hash(schema, self._entries),
            "bytes": {"data": sum(entry.bytes for entry in self._entries)},
            "seconds": summed_seconds([report["seconds"] for report in self.reports()]),
        }
        candidate = self._candidate
        index = plan.store.index(self.run, self.kind)
        ledger = plan.store.ledger(self.run, self.kind)
        first = plan.first_number if self.kind == plan.kinds[-1] else 1
        with storage_errors(self._name):
            if self._files_prefix != candidate:
                self._link_shards(lease)
            self._storage.sync_folders(candidate)
            ledger.prepare()
            while self.committed is None:
                number = self._number(ledger, first, fields["content_hash"], index.numbers())
                if plan.only_number not in (None, number):
                    self._storage.delete_tree(candidate)
                    raise ConflictError(
                        f"{self._name}@{plan.only_number}",
                        plan.if_number_taken,
                        next="choose another name for the run",
                    )
                manifest = Manifest(run=self.run, kind=self.kind, version=number, **fields)
                self._storage.write(f"{candidate}/manifest.json", manifest.to_json())
                ref = Ref(self.run, self.kind, number)
                # the last look before the rename: another process may have taken over
                if not lease.is_held():
                    raise taken_over(self._name)
                if self._storage.publish(candidate, ref.folder):
                    # if this process dies here, the next one notes the version in ledger and index
                    ledger.note(manifest)
                    index.add(manifest)
                    keep_reserve(self._storage)
                    plan.store.written.add(str(ref))
                    self.committed = Version(ref, self._storage)

    def _link_shards(self, lease: Lease) -> None:
        """Link the shards into the candidate. Raises BusyError if one changed after sealing."""
        self._storage.make_prefix(self._candidate, durable=False)
        for entry in self._entries:
            key = f"{self._candidate}/{entry.name}"
            self._storage.copy_into(f"{self._prefix}/{entry.name}", key)
            # another process may have written to a shard after it was sealed
            is_after_others = lease.number > 1 or not self.shards.is_sole
            if is_after_others and self._storage.sha256(key) != entry.sha256:
                raise taken_over(self._name)

    def _number(self, ledger: Ledger, first: int, content_hash: str, visible: list[int]) -> int:
        """Return the next number, or the old one if a deleted version is made again."""
        number = None
        if not self._force:
            is_imported = self._plan.only_number is not None
            # an import is identified by its content alone, whatever run key it had
            run_key = None if is_imported else self.run_key
            number = ledger.number_of_deleted(content_hash, run_key, visible)
        return ledger.next_number(first, visible) if number is None else number


class Staging:
    """The writers of a plan, under one lease."""

    def __init__(self, plan: Plan, *, force: bool) -> None:
        self.plan = plan
        self.worker = uuid.uuid4().hex[:12]
        self.writers = {kind: Writer(plan, kind, self.worker, force=force) for kind in plan.kinds}
        self.last = self.writers[plan.kinds[-1]]
        self.leases = self._leases_of(plan.run_key)
        self.lease: Lease | None = None
        """The work lease, if this process does the work alone."""
        self._force = force

    @property
    def committed(self) -> Version | None:
        """The version of the last kind, once it is committed."""
        return self.last.committed

    def publish(self) -> Version:
        """Publish every kind in the plan's order, and return the version of the last one.

        All files are flushed and hashed before, so only milliseconds pass between the first rename
        and the last. If a process dies in between, the first kinds stay. The same call does the
        work again (a training resumes at its last saved step) and publishes only the missing ones.
        """
        for writer in self.writers.values():
            writer.seal()
        lease = self.lease or self.last.shards.commit_lease
        if not lease.is_held():
            raise taken_over(self.plan.name)
        for writer in self.writers.values():
            writer.remove_candidates()
        *first_kinds, _ = self.plan.kinds
        metrics: dict[str, Any] = {}
        for kind in first_kinds:
            writer = self.writers[kind]
            if not writer.is_committed():
                writer.publish(lease, {})
            metrics[kind] = str(writer.committed.ref)
        if not self.last.shards.is_sole:
            metrics["workers"] = sum(report["shards"] > 0 for report in self.last.reports())
        self.last.stop_if_committed()
        self.last.publish(lease, metrics)
        return self.committed

    @contextmanager
    def open_alone(self) -> Iterator[None]:
        """Do the work as the only process. Raises BusyError if another one is at it."""
        self.leases.label = "alone"
        self.lease = self.leases.take_when_stale("work")
        if self.lease is None:
            raise self._busy(self.leases.holder("work"), " now")
        try:
            for name in self.leases.names():
                holder = self.leases.holder(name) if name.startswith("worker-") else None
                if holder is not None:
                    raise self._busy(holder, " and others that share it")
            for writer in self.writers.values():
                writer.shards = SoleShards(writer)
                writer.remove_candidates()
            # finished shards are worth keeping, half a checkpoint is not
            self._prepare(fresh=self._force or self.last.kind == "policy")
            with self._ended_by_others():
                yield
        finally:
            try:
                self._sweep()
            finally:
                self.lease.release()

    @contextmanager
    def open_together(self) -> Iterator[None]:
        """Do the work as one of several processes that share it.

        Raises BusyError if a process works on it alone.
        """
        writer, leases = self.last, self.leases
        leases.label = "shared"
        presence = leases.take(f"worker-{self.worker}")
        try:
            deadline = time.monotonic() + _JOIN_SECONDS
            while (holder := leases.holder("work")) is not None:
                if time.monotonic() > deadline:
                    raise self._busy(holder, " alone")
                time.sleep(0.05)
            self._prepare(fresh=False)
            if writer.is_committed():
                yield
                return
            shards = SharedShards(writer, leases, self.worker, self.plan.patience_seconds)
            with shards as writer.shards, self._ended_by_others():
                yield
        finally:
            try:
                self._sweep()
            finally:
                presence.release()

    def _prepare(self, *, fresh: bool) -> None:
        """Make the staging folders, and note which versions are read, so that none is deleted.

        Stops if the version was committed meanwhile.
        """
        with self._ended_by_others():
            self.last.stop_if_committed()
            for writer in self.writers.values():
                writer.prepare(fresh=fresh)
            sources = [str(version.ref) for version in self.plan.inputs.values()]
            sources += [model.ref for model in self.plan.models]
            self.last.write_note(SOURCES, {"refs": sources})
            for model_ref in filter(None, (as_version(model.ref) for model in self.plan.models)):
                rescue(self.plan.store.storage, model_ref)  # not every stage reads its models
            for version in self.plan.inputs.values():
                self.plan.store.hold(version.ref)

    @contextmanager
    def _ended_by_others(self) -> Iterator[None]:
        """Wrap the work, and end it early if another process has committed the version.

        What happens to an error of the work:

            CommittedByOther                        swallowed; the version exists
            OutcomeUnknownError                     raised: it is from this process's own commit
            lease held, a staged file vanished      BusyError: another process removed the file
            lease held, other error                 raised
            no lease, not committed, other error    raised (work is shared; commit lease not taken)
            no lease, not committed, file vanished  BusyError: another process took over
            lease lost, not committed               BusyError: another process took over
            no lease or lost, version committed     swallowed, with a warning unless a file vanished
        """
        try:
            yield
        except CommittedByOther:
            return
        except OutcomeUnknownError:  # from this process's own commit
            raise
        except Exception as error:
            lease = self.lease or (self.last.shards and self.last.shards.commit_lease)
            # a process that slept too long may have removed a staged file
            is_disturbed = error_number(error) == errno.ENOENT and "/.staging/" in str(error)
            if lease is not None and lease.is_held():
                if is_disturbed:
                    raise self._busy(None, " as well") from error
                raise
            if not self.last.is_committed():
                if lease is None and not is_disturbed:
                    raise
                raise taken_over(self.plan.name) from error
            if not isinstance(error, FileNotFoundError):  # the staged files were removed since
                log.warning(
                    "%s was finished by others; here: %s", self.committed.ref, printable(error)
                )

    def _leases_of(self, run_key: str) -> Leases:
        plan = self.plan
        prefix = f"{plan.run}/{plan.kinds[-1]}/.staging/{run_key}.leases"
        return Leases(plan.store.storage, prefix)

    def _sweep(self) -> None:
        """Once the work is done, remove its staged files.

        Also remove those left by finished work whose process died too early.
        """
        plan, storage = self.plan, self.plan.store.storage
        for kind in plan.kinds if self.committed else ():
            staging = f"{plan.run}/{kind}/.staging"
            names = storage.list(staging)
            run_keys = {name.partition(".")[0] for name in names} - {plan.run_key}
            is_done = plan.store.index(plan.run, kind).numbers_with
            left_over = {key for key in run_keys if is_done(key) and not self._is_at_work(key)}
            for name in reversed(names):  # notes before the shards that they describe
                if name.partition(".")[0] in {plan.run_key, *left_over}:
                    storage.delete_tree(f"{staging}/{name}")

    def _is_at_work(self, run_key: str) -> bool:
        """Return True if a process holds a lease of this other work, maybe a forced repeat."""
        leases = self._leases_of(run_key)
        return any(leases.holder(name) for name in leases.names())

    def _busy(self, holder: Link | None, manner: str) -> BusyError:
        process = f"process {holder.owner.pid}" if holder else "another process"
        return BusyError(
            f"{self.plan.name} {printable(self.plan.stage)}",
            f"{process} is at this very work{manner}",
            next="wait for it, then run again",
        )


@contextmanager
def open_staging(plan: Plan, *, force: bool = False, share: bool = False) -> Iterator[Staging]:
    """Open the writers for `plan`, under its lease; with `share`, together with other processes.

    If another process commits the version meanwhile, the body ends early, with `committed` set.

    Raises:
        BusyError: another process is at work on it.
        ConfigError: both `share` and `force` are given.
    """
    if share and force:
        raise ConfigError(
            f"{plan.name} {printable(plan.stage)}",
            "force does again what is done, and only one process can: the others could not tell it "
            "from what it replaces",
            next="leave out force, or share",
        )
    staging = Staging(plan, force=force)
    with storage_errors(plan.name):
        plan.store.storage.make_prefix(f"{plan.run}/{plan.kinds[-1]}/.staging")
        with staging.open_together() if share else staging.open_alone():
            yield staging


def taken_over(name: str) -> BusyError:
    """Build the error for a process that lost its lease; see the top of this file."""
    return BusyError(
        name,
        "another process took this work over while this one was not heard of",
        next="wait for it, then run again",
    )
