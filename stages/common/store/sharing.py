"""Who writes which shard of a version: one process alone, or any number of them, on any hosts.

    for index in writer.take_shards(count):    # waits while the others are at the last shards
        writer.write(index, table)
    writer.finish()     # one process comes here; in the others CommittedByOther is raised before

Each process has a lease that says that it is there, and one for each shard that it is at. Leases
decide who does the work, and nothing else: a shard is put into place whole and the first one stays,
and the version appears once (see `writer`). So a process that hangs costs work done twice and never
another outcome. Where a process starts follows from its rank among those that are there. An idle
one takes any shard that nobody holds, and one that another has held for longer than its patience.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .leases import Lease, Leases

LEAST_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2
_COMMIT = "commit"


class CommittedByOther(Exception):
    """Another process has committed the version."""


class SoleShards:
    """All shards that are not finished are this process's."""

    is_sole = True
    commit_lease = None

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._unfinished: list[int] = []
        self._untaken: list[int] = []

    def begin(self, count: int) -> None:
        """There are `count` shards; those that an earlier attempt finished are kept."""
        self._unfinished = [index for index in range(count) if not self._writer.has(index)]
        self._untaken = list(self._unfinished)

    def __iter__(self) -> Iterator[int]:
        while self._untaken:
            yield self._untaken.pop(0)

    def unfinished(self) -> list[int]:
        """Shards that are not finished, rising."""
        return list(self._unfinished)

    def more(self) -> bool:
        """Whether there is a shard to take."""
        return bool(self._untaken)

    def take(self) -> int | None:
        """The next shard; None when all are taken."""
        return self._untaken.pop(0) if self._untaken else None

    def written(self, index: int) -> None:
        """Shard `index` is finished."""
        if index in self._unfinished:
            self._unfinished.remove(index)

    def report(self) -> dict[str, Any]:
        """What is told of the shards of this process."""
        return {}

    def other_reports(self) -> list[dict[str, Any]]:
        """What other processes say of theirs."""
        return []


class SharedShards:
    """Shards are leased one after the other; a context manager that lets go of what is left."""

    is_sole = False

    def __init__(
        self, writer: Any, leases: Leases, worker: str, patience_seconds: float | None
    ) -> None:
        """`patience_seconds` None: twice what the slowest shard took that anybody finished, and at
        least 30 s."""
        self.commit_lease: Lease | None = None
        self._writer = writer
        self._leases = leases
        self._worker = worker
        self._patience_seconds = patience_seconds
        self._count = 0
        self._held: dict[int, Lease] = {}
        self._refused_at = float("-inf")
        self._slowest_seconds = 0.0
        self._num_written = 0

    def __enter__(self) -> SharedShards:
        if not self._other_workers():
            for name in self._report_names():  # of earlier attempts, all dead: their shards stay
                self._writer.delete_note(name)
        return self

    def __exit__(self, *error: object) -> None:
        for lease in [*self._held.values(), *([self.commit_lease] if self.commit_lease else [])]:
            lease.release()

    def begin(self, count: int) -> None:
        """There are `count` shards."""
        self._count = count

    def __iter__(self) -> Iterator[int]:
        while self.more():
            yield from iter(self.take, None)

    def unfinished(self) -> list[int]:
        """Shards that nobody has finished, rising."""
        return sorted(set(range(self._count)) - set(self._writer.noted()))

    def more(self) -> bool:
        """Wait for a shard to take. False: all are finished and whole, and it is this process that
        commits. CommittedByOther."""
        while self.commit_lease is None:
            self._writer.stop_if_committed()
            unfinished = self.unfinished()
            if unfinished:
                index = self._lease_one(unfinished)
                if index is not None:
                    # others may have it: some callers load an engine for minutes before they take
                    self._held.pop(index).release()
                    return True
            elif self._may_commit():
                break
            with self._writer.phase("wait"):
                time.sleep(_POLL_SECONDS)
        return False

    def _may_commit(self) -> bool:
        """Take the lease to commit, where it is free and every shard is whole. A damaged one is
        dropped: somebody does it again."""
        lease = self._leases.take(_COMMIT)
        if lease is None:
            return False
        damaged = [index for index in range(self._count) if not self._writer.has(index)]
        for index in damaged:
            self._writer.drop(index)
        if damaged:
            lease.release()
            return False
        self.commit_lease = lease
        return True

    def take(self) -> int | None:
        """Lease a shard without waiting; None: not now. A process that has one gets another only
        where each of the others finds one as well."""
        if self._held and time.monotonic() - self._refused_at < _POLL_SECONDS:
            return None  # an engine asks at each of its steps
        untaken = [index for index in self.unfinished() if index not in self._held]
        index = None
        free = [index for index in untaken if self._leases.holder(_shard(index)) is None]
        if not self._held or len(free) > len(self._other_workers()):
            index = self._lease_one(untaken)
        self._refused_at = time.monotonic() if index is None else float("-inf")
        return index

    def written(self, index: int) -> None:
        """Shard `index` is finished, by this process or another."""
        lease = self._held.pop(index, None)
        if lease is not None:
            self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - lease.taken_at)
            lease.release()
        self._num_written += 1
        self._writer.write_note(f"{self._worker}.report", self._writer.report())

    def report(self) -> dict[str, Any]:
        """What is told of the shards of this process."""
        return {"shards": self._num_written, "slowest": self._slowest_seconds}

    def other_reports(self) -> list[dict[str, Any]]:
        """What other processes said when they finished their last shard."""
        names = [name for name in self._report_names() if name != f"{self._worker}.report"]
        reports = [self._writer.read_note(name) for name in names]
        return [report for report in reports if report is not None]

    def _lease_one(self, indices: list[int]) -> int | None:
        """A free shard, from where this process's rank begins; with empty hands also the one that
        another has held for longest, if for long enough."""
        # where a process begins follows from its rank, so that several do not try the same shards
        others = self._other_workers()
        rank = sum(worker < self._worker for worker in others)
        start = rank * self._count // (len(others) + 1)
        for index in [*filter(lambda index: index >= start, indices), *indices]:
            lease = self._leases.take(_shard(index))
            if lease is not None:
                return self._hold(index, lease)
        if self._held:
            return None
        patience = self._patience_seconds
        if patience is None:
            slowest = max(report["slowest"] for report in self._writer.reports())
            patience = max(LEAST_PATIENCE_SECONDS, 2 * slowest)
        longest_first = sorted(indices, key=lambda index: -self._leases.seconds_seen(_shard(index)))
        for index in longest_first:
            if self._leases.seconds_seen(_shard(index)) >= patience:
                lease = self._leases.take(_shard(index), from_living=True)
                if lease is not None:
                    return self._hold(index, lease)
        return None

    def _hold(self, index: int, lease: Lease) -> int | None:
        if index in self._writer.noted():  # finished between the look and the lease
            lease.release()
            return None
        self._held[index] = lease
        return index

    def _other_workers(self) -> list[str]:
        """The other processes that are there."""
        names = [name for name in self._leases.names() if name.startswith("worker-")]
        workers = [name.removeprefix("worker-") for name in names if self._leases.holder(name)]
        return [worker for worker in workers if worker != self._worker]

    def _report_names(self) -> list[str]:
        return [name for name in self._writer.note_names() if name.endswith(".report")]


def _shard(index: int) -> str:
    return f"shard-{index:05d}"
