"""Writing versions: staged shard by shard under a lease, then published at once.

    with open_staging(plan) as staging:
        if staging.committed:
            return staging.committed                      # another process has finished it
        writer = staging.writers["rewards"]
        for index in writer.take_shards(count):    # a restart skips finished shards
            writer.write(index, table)
        writer.finish(metrics={...})
        return staging.publish()

Contents of `STORE/<run>/<kind>/.work/` until the work is done:

    KEY.0/            shards
    KEY.0.notes/      a note that makes each shard count, and each process's report
    KEY.0.leases/     which processes are at work (see `leases`)
    KEY.0.resume/     state from which a killed stage resumes
    KEY.0.WORKER/     the shards while one process publishes them, or the policy that it writes

In a bucket, `KEY.0` and the policy's `KEY.0.WORKER` lie in `.data`, and stay there.

KEY is the run key, WORKER names a process (`Staging.worker`), and 0 is the repetition: the number
of versions with this run key that existed before the work began, or a higher one
(`Plan.repetition_at`). So work that is repeated never touches the data of an earlier version, and a
process that resumes killed work finds what was made of it.

A shard's name holds its hash, so two processes that write the same shard do not disturb each other.
Its note is created only if absent: the first one decides which copy counts.

A stage finishes each writer: it gives the metrics. The commit first seals all writers: shards are
read back and compared with their notes. Then each is published. The process lists the versions (1),
looks if one of them has its run key or is made of the same files (2), looks at its lease (3), and
writes its manifest under the next number (4), which fails if the number is taken; then it starts
again at (1). So a version appears once: a process that publishes number N has seen every version
below N, and of two that try N, one fails and looks again. A process that slept, and lost its lease
meanwhile, finds the version in (2), its lease gone in (3), or its files taken back in (4).

(1), (2) and (4) alone make a version unique. (3) ends a process early whose files the next holder
is about to take back, and leaves the commit to that one. Otherwise leases only save work.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from quiver.schemas.manifest import FileEntry, Manifest, content_hash
from quiver.schemas.refs import Ref, as_version
from quiver.stages.core.files import error_number, storage_errors
from quiver.stages.core.store.plan import Plan
from quiver.stages.core.threads import map_in_threads

from .environment import environment
from .leases import Lease, Leases, Link
from .listing import Listing
from .notes import (
    SHARD_NOTE,
    SOURCES,
    WORK,
    note_name,
    read_note,
    shard_name,
)
from .sharing import CommittedByOther, SharedHandout, SoleHandout
from .storage import read_table, size_and_sha256, with_checksum
from .usage import Meter, totals_of
from .versions import Version, schema_module

ROWS_PER_SHARD = 256
"""Least rows per shard for work that is saved as it goes (`shard_rows`). A crash costs a process
its unfinished shards: usually one; in generate about two, or more if its engine decodes more rows
at once. Shards of rows with pictures, and of sampled episodes, never grow, since a shard's rows are
in memory together."""
ROWS_AT_ONCE = 2048
"""Least rows per shard when the whole table is in memory. It is larger, because each shard costs
two flushes: of its file, and of its note."""
MOST_SHARDS = 256
"""Most shards of a version whose shards grow with its rows. So each shard that a crash costs is at
most 1/256 of a large version, and 256 processes can share the work."""
_FILES_AT_ONCE = 4
"""Files of a policy that are flushed and hashed at once."""
_JOIN_SECONDS = 10.0
_KEPT = ("leases", "resume")
"""Folders of unfinished work that `discard` keeps."""
log = logging.getLogger(__name__)


def shard_rows(rows: int, least: int = ROWS_PER_SHARD) -> int:
    """Return the rows per shard of a version with `rows` rows: a multiple of `least`."""
    return least * max(1, math.ceil(rows / (least * MOST_SHARDS)))


class Writer:
    """Stages and commits one version of one kind. The top of this file lists what it writes."""

    def __init__(self, plan: Plan, kind: str, worker: str, *, force: bool) -> None:
        self.kind = kind
        self.run = plan.run
        self.run_key = plan.run_key
        self.seconds: dict[str, float] = {}
        """Seconds by phase, in this process."""
        self.report_fields: dict[str, Any] = {}
        """Fields that the stage adds to its report, as plain JSON. Set them before a shard is
        written: the committing process sees only what was noted by then.
        """
        self.committed: Version | None = None
        """The version, once it is committed."""
        self.handout: SoleHandout | SharedHandout | None = None
        """Hands out the shards."""
        is_last = kind == plan.kinds[-1]
        self._before = plan.listing if is_last else plan.store.listing(plan.run, kind)
        self.repetition = plan.repetition_at(kind, self._before)
        self.work = f"{plan.run}/{kind}/.work/{plan.run_key}.{self.repetition}"
        """Prefix of the shards; `.notes`, `.leases` and `.resume` follow it."""
        self._plan = plan
        self._name = f"{plan.run}/{kind}"
        self._storage = plan.store.storage
        self._worker = worker
        self._files = self.work.replace("/.work/", f"/{self._storage.data_folder}/")
        """Prefix of the shards, or of the policy's files."""
        # libraries write a policy's files in place, so a process that slept must not share the
        # folder
        if kind == "policy":
            self._files += f".{worker}"
        self._count: int | None = None
        self._meter = Meter()
        self._entries: tuple[FileEntry, ...] = ()
        self._schema_name = "policy/1"
        self._finished: dict[str, Any] | None = None
        self._put: dict[str, Future[tuple[int, str]]] = {}
        """Size and sha256 of the policy's files that are put while it is written, by name."""
        self._threads = ThreadPoolExecutor(_FILES_AT_ONCE)
        self._ids: pa.ChunkedArray | None = None
        # with force, the versions that were there before do not count as this work
        self._skip = len(self._before.find(plan.run_key)) if force else 0

    # -- unfinished work

    @property
    def folder(self) -> Path:
        """Folder on this host for a policy's files; its final contents are published."""
        return self._storage.folder(self._files)

    def file_done(self, path: Path) -> None:
        """Flush and hash a policy's file in a thread, while the stage writes the next one. It must
        not change any more."""
        name = path.relative_to(self.folder).as_posix()
        self._put[name] = self._threads.submit(self._storage.put_file, f"{self._files}/{name}")

    @property
    def resume_folder(self) -> Path:
        """Folder on this host for files that are needed only while the work is done."""
        return self._storage.folder(f"{self.work}.resume")

    def discard(self) -> None:
        """Delete what was made of this version, so that the work begins anew."""
        self._delete(lambda repetition, rest: repetition == self.repetition and rest not in _KEPT)

    def clear(self) -> None:
        """Delete all that is left of the finished work, also of earlier repetitions that died."""
        self._delete(lambda repetition, _: repetition <= self.repetition)

    def _delete(self, is_meant: Callable[[int, str | None], bool]) -> None:
        """Delete folders of this work, chosen by their repetition and what follows it."""
        place = f"{self._name}/.work"
        matches = filter(None, map(WORK.fullmatch, self._storage.list(place)))
        names = [m[0] for m in matches if m[1] == self.run_key and is_meant(int(m[2]), m[3])]
        # notes first: no note may exist without its shard
        self._storage.delete(*(f"{place}/{name}/" for name in reversed(names)))

    def recover_shards(self) -> None:
        """Take back the shards that a dead or sleeping process left while it published them.
        Only the holder of the lease may call it."""
        self._storage.reclaim(self.work)

    def is_committed(self, listing: Listing | None = None) -> bool:
        """Return True if the version exists by now, or in `listing`, and then set `committed`."""
        if self.committed is not None:
            return True
        store = self._plan.store
        listing = listing or store.listing(self.run, self.kind)
        # Search only if there may be one: some had this key when the work began, or the listing has
        # grown since.
        if self.repetition or listing.given != self._before.given:
            self.committed = store.find(
                self.run, self.kind, self.run_key, skip=self._skip, listing=listing
            )
        return self.committed is not None

    def stop_if_committed(self) -> None:
        """Raise CommittedByOther if another process has committed the version."""
        if self.is_committed():
            raise CommittedByOther

    # -- shards

    def take_shards(self, count: int) -> Iterator[int]:
        """Yield the indices, out of `count` shards, that this process is to write."""
        return iter(self.hand_out(count))

    def hand_out(self, count: int) -> SoleHandout | SharedHandout:
        """Start handing out `count` shards, and return `handout`, which does so."""
        self._count = count
        self.handout.begin(count)
        return self.handout

    def rows_per_shard(self, rows: int) -> int:
        """Return the rows per shard: `rows`, unless existing shards were begun with another number.

        Those may come from an earlier process or from another one at work. The note `cut` holds the
        number; if it is missing, nobody knows which rows the finished shards hold, and they are
        dropped.
        """
        fields = {"rows_per_shard": rows}
        with storage_errors(self._name):
            noted = self.noted()
            if self.handout.is_sole and not noted:  # nothing is finished, so nothing binds
                self.write_note("cut", fields)
                return rows
            if self.read_note("cut") is None:
                for index in noted:  # the row count is unknown
                    self.drop(index)
            self._storage.put_if_absent(f"{self.work}.notes/cut", with_checksum(fields))
            begun_with = self.read_note("cut")
            if begun_with is None:  # torn
                self.write_note("cut", fields)
            return (begun_with or fields)["rows_per_shard"]

    def is_finished(self, index: int) -> bool:
        """Return True if shard `index` is finished and unchanged."""
        entry = self._note(index)
        return entry is not None and self._is_whole(entry)

    def _is_whole(self, entry: FileEntry) -> bool:
        try:
            expected = entry.bytes, entry.sha256
            key = f"{self._files}/{entry.name}"
            return size_and_sha256(self._storage, key, expected) == expected
        except (FileNotFoundError, CorruptError):
            return False

    def noted(self) -> list[int]:
        """Return the indices of the finished shards, by any process, rising."""
        matches = map(SHARD_NOTE.fullmatch, self.note_names())
        return sorted(int(match[1]) for match in matches if match)

    def note_names(self) -> list[str]:
        """Return the names of all notes."""
        return self._storage.list(f"{self.work}.notes")

    def read_note(self, name: str) -> dict[str, Any] | None:
        """Read a note. Returns None if it is missing or damaged."""
        return read_note(self._storage, f"{self.work}.notes/{name}")

    def write_note(self, name: str, fields: dict[str, Any]) -> None:
        """Write a note beside the shards, replacing an earlier one."""
        self._storage.put(f"{self.work}.notes/{name}", with_checksum(fields))

    def delete_note(self, name: str) -> None:
        """Delete a note."""
        self._storage.delete(f"{self.work}.notes/{name}")

    def read(self, index: int) -> pa.Table:
        """Return a finished shard."""
        entry = self._note(index)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "it is not finished", note_name(index))
        return read_table(self._storage, f"{self._files}/{entry.name}")

    def drop(self, index: int) -> None:
        """Discard shard `index`, so that it is written again."""
        self.delete_note(note_name(index))

    def write(self, index: int, table: pa.Table) -> None:
        """Write shard `index`, flushed, then a note that makes it count.

        If another process has finished the shard already, its copy stays.

        Args:
            table: the shard's rows, in order.

        Raises:
            SchemaError: the table does not fit the kind.
        """
        kind_schema = schema_module(self.kind).check(table)
        with storage_errors(f"{self._name} shard {index}"):
            rows = table.replace_schema_metadata(kind_schema.metadata).combine_chunks()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_file(sink, rows.schema) as arrow:
                arrow.write_table(rows)
            raw = sink.getvalue()
            sha256 = hashlib.sha256(raw).hexdigest()
            name = shard_name(index, sha256)
            entry = FileEntry(name=name, bytes=raw.size, sha256=sha256, rows=len(rows))
            # the same name has the same bytes, unless a power loss or the disk damaged them
            is_new = self._storage.put_if_absent(f"{self._files}/{name}", raw)
            if not is_new and not self._is_whole(entry):
                self._storage.put(f"{self._files}/{name}", raw)
            note = with_checksum(entry.model_dump(mode="json"))
            key = f"{self.work}.notes/{note_name(index)}"
            if not self._storage.put_if_absent(key, note) and not self.is_finished(index):
                self._storage.put(key, note)
            self.handout.written(index)

    def write_table(self, table: pa.Table) -> None:
        """Write all rows, in shards of at least ROWS_AT_ONCE; an empty table makes one empty shard.

        Raises SchemaError.
        """
        rows = self.rows_per_shard(shard_rows(len(table), ROWS_AT_ONCE))
        for index in self.take_shards(max(1, math.ceil(len(table) / rows))):
            self.write(index, table.slice(index * rows, rows))

    def _note(self, index: int) -> FileEntry | None:
        """Return the entry in a shard's note, or None if it is missing or damaged."""
        fields = self.read_note(note_name(index))
        if fields is None or fields["name"] != shard_name(index, fields["sha256"]):
            return None
        return FileEntry.model_validate(fields)

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
        """Return this process's report: `report_fields`, seconds by phase, usage, its shards."""
        return {
            **self.report_fields,
            **self._meter.report(self.seconds),
            **self.handout.report(),
        }

    def reports(self) -> list[dict[str, Any]]:
        """Return the reports of all processes that took part, this one first."""
        return [self.report(), *self.handout.other_reports()]

    def finish(
        self,
        *,
        metrics: dict[str, Any] | None = None,
        status: dict[str, int] | None = None,
        device: str = "cpu",
        ids: pa.ChunkedArray | None = None,
    ) -> None:
        """Declare all data written, and give the remaining fields of the manifest.

        Args:
            status: rows by outcome.
            ids: what the column rollout_id must hold. None: not checked.
        """
        self._ids = ids
        self._finished = {
            "metrics": metrics or {},
            "status": status or {},
            "environment": {**environment(), "device": device},
        }

    def seal(self, lease: Lease) -> None:
        """Check that the staged data is complete; nothing may be written afterwards.

        A policy's files are flushed and hashed by now (`file_done`), or here. A table's shards were
        flushed and hashed when they were written; they are read back, and their numbers, ids and
        schema are checked.

        Raises:
            CorruptError: shards are not numbered 0 to n − 1, so some are missing, or rows are not
                the ones that were asked for. The staged data is discarded.
            BusyError: another process took over the lease; its data stay.
            CommittedByOther: another process has committed the version.
        """
        if self._finished is None:
            raise RuntimeError(f"{self._name}: the stage has not finished its writer")
        with self.phase("commit"), storage_errors(self._name):
            if self.kind == "policy":
                for path in [path for path in self.folder.rglob("*") if path.is_file()]:
                    if path.relative_to(self.folder).as_posix() not in self._put:
                        self.file_done(path)
                self._entries = tuple(
                    FileEntry(name=name, bytes=size, sha256=sha256)
                    for name, put in sorted(self._put.items())
                    for size, sha256 in [put.result()]
                )
                return
            indices = self.noted()
            self._entries = tuple(map(self._note, indices))
            count = len(indices) if self._count is None else self._count
            problem = None
            if indices != list(range(count)) or None in self._entries:
                problem = f"found shards {indices}, expected 0 to {count - 1}"
            # shared shards were compared under the commit lease
            elif self.handout.is_sole and not all(map_in_threads(self._is_whole, self._entries)):
                problem = "a shard is not what was written"
            else:
                keys = (f"{self._files}/{entry.name}" for entry in self._entries)
                table = pa.concat_tables(read_table(self._storage, key) for key in keys)
                if self._ids is not None and self._ids != table["rollout_id"]:
                    problem = "its rows are not the requested ones"
            if problem:
                self.stop_if_committed()
                if not lease.is_held():
                    raise taken_over(self._name)
                self.discard()
                raise CorruptError(
                    self._name,
                    problem,
                    state="what was made of it is thrown away; all versions are intact.",
                    next="run the same command again",
                )
            self._schema_name = kind_of(schema_module(self.kind).check(table))

    def publish(self, lease: Lease, metrics: dict[str, Any]) -> None:
        """Publish the version under the next number, and set `committed`.

        Raises:
            ConflictError: the plan allows one number only, and it is taken.
            BusyError: another process took over the lease.
            CommittedByOther: another process has committed the version.
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
            "place": self._files.partition("/.data/")[2],
            "rows": sum(entry.rows for entry in self._entries),
            "content_hash": content_hash(schema, self._entries),
            "bytes": {"data": sum(entry.bytes for entry in self._entries)},
            **totals_of(self.reports(), lease),
        }
        sizes = {entry.name: entry.bytes for entry in self._entries}
        with storage_errors(self._name):
            while self.committed is None:
                # this order makes sure that a version appears once: see the top of this file
                listing = plan.store.listing(self.run, self.kind)
                # one look may miss a name that another process adds at that moment
                while listing.given != (again := plan.store.listing(self.run, self.kind)).given:
                    listing = again
                number = self._next_number(listing)
                if self.is_committed(listing):
                    raise CommittedByOther
                # `is_committed` does not see a version that was removed. In a bucket, a process
                # that shared the work may have published these very files while this one slept,
                # and that version may have been removed since. A second version must not name
                # files that gc is about to delete.
                has_grown = listing.given != self._before.given
                for same in listing.find(self.run_key) if has_grown else ():
                    ref = Ref(self.run, self.kind, same)
                    if Version(ref, self._storage).prefix == self._files:
                        raise taken_over(self._name)
                manifest = Manifest(run=self.run, kind=self.kind, version=number, **fields)
                ref = Ref(self.run, self.kind, number)
                if not lease.is_held():
                    raise taken_over(self._name)
                raw = manifest.to_json()
                if self._storage.publish(self._files, self._worker, ref.folder, raw, sizes):
                    plan.store.written.add(str(ref))
                    self.committed = Version(ref, self._storage)

    def _next_number(self, listing: Listing) -> int:
        """Return the number after the highest one that was ever given.

        Raises ConflictError if the plan allows one number only, and other work has it, or no number
        is left.
        """
        plan = self._plan
        only = plan.only_number
        if only is not None and only not in listing.given:
            return only
        try:
            plan.require_number(listing)
        except ConflictError:
            self._storage.delete(f"{self._files}/")
            raise
        first = plan.first_number if self.kind == plan.kinds[-1] else 1
        highest = max([first - 1, *listing.given])
        if highest >= 10**12 - 1:
            raise ConflictError(
                f"{self._name}@{highest}",
                "has the highest number, so none is left",
                next=f"move {self._storage.url}/{self._name}/v{highest}* away",
            )
        return highest + 1


class Staging:
    """The writers of a plan, under one lease."""

    def __init__(self, plan: Plan, *, force: bool) -> None:
        self.plan = plan
        self.worker = uuid.uuid4().hex[:12]
        self.writers = {kind: Writer(plan, kind, self.worker, force=force) for kind in plan.kinds}
        self.last = self.writers[plan.kinds[-1]]
        self.leases = Leases(plan.store.storage, f"{plan.work}.leases")
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
        lease = self.lease or self.last.handout.commit_lease
        for writer in self.writers.values():
            writer.seal(lease)
        *first_kinds, _ = self.plan.kinds
        metrics: dict[str, Any] = {}
        for kind in first_kinds:
            writer = self.writers[kind]
            with suppress(CommittedByOther):
                writer.publish(lease, {})
            metrics[kind] = str(writer.committed.ref)
        if not self.last.handout.is_sole:
            metrics["workers"] = sum(report["shards"] > 0 for report in self.last.reports())
        self.last.publish(lease, metrics)
        return self.committed

    @contextmanager
    def open_alone(self) -> Iterator[None]:
        """Do the work as the only process. Raises BusyError if another one is at it."""
        self.lease = self.leases.take_or_wait("work")
        if self.lease is None:
            raise self._busy(self.leases.holder("work"))
        try:
            sharers = list(self.leases.workers().values())
            if sharers:
                raise self._busy(sharers[0], ", and shares it with others")
            for writer in self.writers.values():
                writer.handout = SoleHandout(writer)
                # half a checkpoint and its tables are not worth keeping; `.resume` stays
                if self._force or self.last.kind == "policy":
                    writer.discard()
                else:
                    writer.recover_shards()
            if self._force:
                self.plan.store.storage.delete(f"{self.last.work}.resume/")
            self._prepare()
            with self._ended_by_others():
                yield
        finally:
            self._leave(self.lease)

    @contextmanager
    def open_together(self) -> Iterator[None]:
        """Do the work as one of several processes that share it.

        Raises BusyError if a process works on it alone.
        """
        writer, leases = self.last, self.leases
        presence = leases.take(f"worker-{self.worker}")
        try:
            deadline = time.monotonic() + _JOIN_SECONDS
            while (holder := leases.holder("work")) is not None:
                if time.monotonic() > deadline:
                    raise self._busy(holder, " alone")
                time.sleep(0.05)
            self._prepare()
            if writer.is_committed():
                yield
                return
            shards = SharedHandout(writer, leases, self.worker, self.plan.patience_seconds)
            with shards as writer.handout, self._ended_by_others():
                yield
        finally:
            self._leave(presence)

    def _prepare(self) -> None:
        """Note which versions are read, so that their data stay. Stops if the version was committed
        meanwhile."""
        with self._ended_by_others():
            self.last.stop_if_committed()
            sources = [str(version.ref) for version in self.plan.inputs.values()]
            sources += [model.ref for model in self.plan.models]
            self.last.write_note(SOURCES, {"refs": sources})
            for ref in filter(None, map(as_version, dict.fromkeys(sources))):
                self.plan.store.resolve(ref)  # it may have expired before the note

    @contextmanager
    def _ended_by_others(self) -> Iterator[None]:
        """Wrap the work, and end it early if another process has committed the version.

        What happens to an error of the work, the first that is true:

            CommittedByOther, all kinds are there     swallowed
            CommittedByOther, only first kinds are    BusyError: another process took over
            OutcomeUnknownError                       raised: it is from this process's own commit
            lease held, no file of `.work` vanished   raised
            the version is committed                  swallowed, with a warning
            work is shared, no lease yet              raised
            the lease was lost                        BusyError: another process took over
        """
        try:
            yield
        except CommittedByOther:
            if not self.last.is_committed():
                raise taken_over(self.plan.name) from None
        except OutcomeUnknownError:
            raise
        except Exception as error:
            lease = self.lease or (self.last.handout and self.last.handout.commit_lease)
            in_work = any(place in str(error) for place in ("/.work/", "/.data/"))
            is_vanished = error_number(error) == errno.ENOENT and in_work
            if lease is not None and lease.is_held() and not is_vanished:
                raise
            if self.last.is_committed():
                if not isinstance(error, FileNotFoundError):  # its files were published since
                    log.warning(
                        "%s was finished by others; here: %s", self.committed.ref, printable(error)
                    )
                return
            if lease is None and not is_vanished:
                raise
            raise taken_over(self.plan.name) from error

    def _leave(self, lease: Lease) -> None:
        """Release the lease; or, once the work is done, delete all that is left of it."""
        if self.committed is None:
            lease.release()
            return
        lease.forget()
        for writer in self.writers.values():
            writer.clear()

    def _busy(self, holder: Link | None, manner: str = "") -> BusyError:
        process = f"process {holder.owner.pid}" if holder else "another process"
        return BusyError(
            f"{self.plan.name} {printable(self.plan.stage)}",
            f"{process} is already doing this work{manner}",
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
            "force repeats finished work, and processes that share it could not tell new shards "
            "from old ones",
            next="leave out force, or share",
        )
    staging = Staging(plan, force=force)
    with storage_errors(plan.name), staging.open_together() if share else staging.open_alone():
        yield staging


def taken_over(name: str) -> BusyError:
    """Build the error for a process that lost its lease; see the top of this file."""
    return BusyError(
        name,
        "another process took over this work, because this one had not renewed its lease",
        next="wait for it, then run again",
    )
