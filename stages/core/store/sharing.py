"""Sharing: which process writes which shard, for one process or any number on any hosts.

    for index in writer.take_shards(count):    # waits while other processes finish the last shards
        writer.write(index, table)
    writer.finish()     # reached by one process; the others get CommittedByOther before

An `index` is a shard's number, from 0. A process that does the work alone holds the lease `work`.
One that shares it holds a lease that shows its presence and one for each shard it works on. Leases
only divide the work. They are not needed for correctness: the first whole copy of a shard wins, and
the version appears once (see `writer`). So a process that hangs costs repeated work, never a
different result.

Each process starts at a shard that follows from its place among the names of the processes present,
so that they do not compete. An idle process takes any free shard. Its patience is the time for
which another process may hold a shard; after that it takes that shard too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from quiver.stages.core.threads import map_in_threads

from .leases import Lease, Leases

LEAST_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2
_COMMIT = "commit"


class CommittedByOther(Exception):
    """Another process has committed the version."""


class SoleHandout:
    """Hands out the shards to a single process: all unfinished shards are its own."""

    is_sole = True
    commit_lease = None

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._unfinished: list[int] = []
        self._untaken: list[int] = []

    def begin(self, count: int) -> None:
        """Set the number of shards. Those that an earlier process finished are kept."""
        noted = set(self._writer.noted())
        self._unfinished = [
            index
            for index in range(count)
            if index not in noted or not self._writer.is_finished(index)
        ]
        self._untaken = list(self._unfinished)

    def __iter__(self) -> Iterator[int]:
        return iter(self.take, None)

    def unfinished(self) -> list[int]:
        """Return the unfinished shards, rising."""
        return list(self._unfinished)

    def wait_for_work(self) -> bool:
        """Return True if a shard is left to take."""
        return bool(self._untaken)

    def take(self) -> int | None:
        """Return the next shard, or None if all are taken."""
        return self._untaken.pop(0) if self._untaken else None

    def written(self, index: int) -> None:
        """Record that shard `index` is finished."""
        if index in self._unfinished:
            self._unfinished.remove(index)

    def report(self) -> dict[str, Any]:
        """Return this process's report on its shards."""
        return {}

    def other_reports(self) -> list[dict[str, Any]]:
        """Return the other processes' reports."""
        return []


class SharedHandout:
    """Hands out the shards to several processes, which lease one after another.

    A context manager: leaving it releases the leases that are left.
    """

    is_sole = False

    def __init__(
        self, writer: Any, leases: Leases, worker: str, patience_seconds: float | None
    ) -> None:
        """Take part as process `worker`.

        Args:
            patience_seconds: how long another process may hold a shard before an idle one takes it.
                Default: twice the longest time any process took for a shard, and at least 30 s.
        """
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

    def __enter__(self) -> SharedHandout:
        if not self._other_workers():
            # reports of earlier processes, all dead; their shards stay
            for name in self._report_names():
                self._writer.delete_note(name)
        return self

    def __exit__(self, *error: object) -> None:
        for lease in filter(None, [*self._held.values(), self.commit_lease]):
            lease.release()

    def begin(self, count: int) -> None:
        """Set the number of shards."""
        self._count = count

    def __iter__(self) -> Iterator[int]:
        while self.wait_for_work():
            yield from iter(self.take, None)

    def unfinished(self) -> list[int]:
        """Return the shards that no process has finished, rising."""
        return sorted(set(range(self._count)) - set(self._writer.noted()))

    def wait_for_work(self) -> bool:
        """Wait until a shard can be taken, or until all are finished and the commit lease is taken.

        Returns:
            False if all shards are finished and whole, and this process is the one to commit.

        Raises:
            CommittedByOther: another process has committed the version.
        """
        while self.commit_lease is None:
            self._writer.stop_if_committed()
            unfinished = self.unfinished()
            if unfinished:
                index = self._lease_one(unfinished)
                if index is not None:
                    # release it at once: some callers load an engine for minutes before they take a
                    # shard
                    self._held.pop(index).release()
                    return True
            elif self._may_commit():
                break
            with self._writer.phase("wait"):
                time.sleep(_POLL_SECONDS)
        return False

    def _may_commit(self) -> bool:
        """Take the commit lease, if it is free and every shard is whole.

        Damaged shards are dropped, so that a process writes them again.
        """
        lease = self._leases.take(_COMMIT)
        if lease is None:
            return False
        self._writer.recover_shards()  # another process may have died while it committed
        whole = map_in_threads(self._writer.is_finished, range(self._count))
        damaged = [index for index, is_whole in enumerate(whole) if not is_whole]
        for index in damaged:
            self._writer.drop(index)
        if damaged:
            lease.release()
            return False
        self.commit_lease = lease
        return True

    def take(self) -> int | None:
        """Lease a shard without waiting; return None if no shard can be taken now.

        A process that holds a shard gets another only if enough are free for all other processes.
        """
        if self._held and time.monotonic() - self._refused_at < _POLL_SECONDS:
            return None  # an engine asks at each of its steps
        untaken = [index for index in self.unfinished() if index not in self._held]
        num_needed = len(self._other_workers()) + 1 if self._held else 0
        free = (index for index in untaken if self._leases.holder(_shard(index)) is None)
        is_enough = len(list(islice(free, num_needed))) == num_needed
        index = self._lease_one(untaken) if is_enough else None
        self._refused_at = time.monotonic() if index is None else float("-inf")
        return index

    def written(self, index: int) -> None:
        """Record that shard `index` is finished, by this process or another."""
        lease = self._held.pop(index, None)
        if lease is not None:
            self._slowest_seconds = max(self._slowest_seconds, time.monotonic() - lease.taken_at)
            lease.release()
        self._num_written += 1
        self._writer.write_note(f"{self._worker}.report", self._writer.report())

    def report(self) -> dict[str, Any]:
        """Return this process's report on its shards."""
        return {"shards": self._num_written, "slowest": self._slowest_seconds}

    def other_reports(self) -> list[dict[str, Any]]:
        """Return the reports that other processes wrote with their last finished shard."""
        names = [name for name in self._report_names() if name != f"{self._worker}.report"]
        reports = [self._writer.read_note(name) for name in names]
        return [report for report in reports if report is not None]

    def _lease_one(self, indices: list[int]) -> int | None:
        """Lease one of the shards `indices`, searching first from this process's starting shard.

        A process that holds no shard also takes the shard that another has held longest, if that
        exceeds its patience. Returns None if no shard can be leased.
        """
        others = self._other_workers()
        place = sum(worker < self._worker for worker in others)  # among the sorted names
        start = place * self._count // (len(others) + 1)
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
        """Return the names of the other processes that are present."""
        return [worker for worker in self._leases.workers() if worker != self._worker]

    def _report_names(self) -> list[str]:
        return [name for name in self._writer.note_names() if name.endswith(".report")]


def _shard(index: int) -> str:
    return f"shard-{index:05d}"
