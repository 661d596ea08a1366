"""Who does which shard of a version: one process alone, or any number of them together, on any
hosts that see the store.

    claims = work.claims(count)
    while claims.more():  # waits while the others are at the last shards
        while (index := claims.take()) is not None:
            work.write(index, table)
    work.commit()  # one of them comes here; in all others Finished has risen

A claim is an flock on a file beside the shards. The system frees it as soon as its holder is dead,
however it died. It decides who does the work, and nothing else: each shard is linked into place
whole and the first stays, and the version appears by one rename. So a process that hangs, or locks
that do not reach another host, cost work done twice and never another outcome. Whoever has nothing
to do, and has seen another at a shard for longer than its patience, does that shard too, the one
first seen first.
"""

from __future__ import annotations

import fcntl
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from quiver.schemas.errors import BusyError

if TYPE_CHECKING:
    from .share import SharedWork
    from .work import Work

LEAST_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.2
_LEAVING_SECONDS = 10.0
_COMMIT = "commit"
_SHARED = "and others that share it"


class Finished(Exception):
    """Another process that shares this work has committed the version."""


class Alone:
    """All unfinished shards are this process's; no file is locked for it."""

    def __init__(self, work: Work, count: int) -> None:
        self._work = work
        self._open = [index for index in range(count) if not work.has(index)]
        self._rest = list(self._open)

    def unfinished(self) -> list[int]:
        """Shards that nobody has finished, rising."""
        self._open = [
            index
            for index in self._open
            if not (self._work.notes / f"{_shard(index)}.arrow.json").exists()
        ]
        return list(self._open)

    def more(self) -> bool:
        """Whether there is a shard to take."""
        return bool(self._rest)

    def take(self) -> int | None:
        """The next shard; None when all are taken."""
        return self._rest.pop(0) if self._rest else None


class Claims:
    """Shards are claimed one after the other; `count` is set before the first."""

    count = 0

    def __init__(self, work: SharedWork, patience: float | None) -> None:
        """`patience`: seconds; None: twice what the slowest shard took that anybody finished, and
        at least 30 s."""
        self._work, self._patience = work, patience
        self._held: dict[str, tuple[int, float]] = {}
        """By name the locked handle, and since when."""
        self._seen: dict[tuple[str, int], tuple[str, float]] = {}
        """Which claim of another was met where, and since when."""
        self._number = itertools.count()
        self._here = -1
        self._refused = -math.inf
        self.slowest, self.shards = 0.0, 0

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let the others know of this process: they leave it a shard. What is told of earlier
        attempts, all dead, is forgotten."""
        while (handle := _locked(self._work.notes / f"{self._work.worker}.here")) is None:
            time.sleep(0.01)  # somebody just looked whether anybody is here
        self._here, told = handle, list(self._work.notes.glob("*.part"))
        if not self._others():
            for part in told:
                part.unlink(missing_ok=True)
        try:
            yield
        finally:
            for name in list(self._held):
                self._release(name)
            _unlock(self._here)

    def unfinished(self) -> list[int]:
        """Shards that nobody has finished, rising."""
        with self._work.there():
            noted = set(os.listdir(self._work.notes))
        return [index for index in range(self.count) if f"{_shard(index)}.arrow.json" not in noted]

    def more(self) -> bool:
        """Wait for a shard to take. False: all are finished and whole, and it is this process that
        commits. Finished."""
        while _COMMIT not in self._held:
            self._work.look()
            with self._work.there():
                rest = self.unfinished()
                if rest and (index := self._claim_one(rest)) is not None:
                    self._release(_shard(index))
                    return True
                if not rest and self._claim(_COMMIT, again=True):
                    if not self._drop_damaged():
                        break
                    self._release(_COMMIT)
            with self._work.phase("wait"):
                time.sleep(_POLL_SECONDS)
        return False

    def take(self) -> int | None:
        """Claim a shard without waiting; None: not now. Ahead of need only where each idle process
        finds one as well."""
        if (
            self._held and time.monotonic() - self._refused < _POLL_SECONDS
        ):  # an engine asks at each of its steps
            return None
        with self._work.there():
            rest = [index for index in self.unfinished() if _shard(index) not in self._held]
            found = None if self._held and not self._plenty(rest) else self._claim_one(rest)
        self._refused = time.monotonic() if found is None else -math.inf
        return found

    def written(self, index: int) -> None:
        """Shard `index` is finished, by this process or another."""
        self.slowest = max(self.slowest, time.monotonic() - self._release(_shard(index)))
        self.shards += 1

    def _claim_one(self, rest: list[int]) -> int | None:
        """A free shard; for one with empty hands also the shard that another has held for longest,
        if for long enough."""
        free = (index for index in rest if self._claim(_shard(index), again=False))
        found = next(free, None)
        if found is None and not self._held:
            rest = sorted(rest, key=lambda index: self._seen.get((_shard(index), 0), ("", 0.0))[1])
            found = next((index for index in rest if self._claim(_shard(index), again=True)), None)
        return found

    def _plenty(self, rest: list[int]) -> bool:
        """Whether more shards are free than other processes have none."""
        idle, free = self._others(), 0
        for index in rest:
            handle = self._lock(_shard(index), again=False)
            if handle is None:
                idle.discard(self._seen[_shard(index), 0][0].partition(" ")[0])
            else:
                _unlock(handle)
                free += 1
            if free > len(idle):
                return True
        return False

    def _others(self) -> set[str]:
        """The other processes that live."""
        here = {
            path.stem: _locked(path)
            for path in self._work.notes.glob("*.here")
            if path.stem != self._work.worker
        }
        for handle in filter(None, here.values()):
            _unlock(handle)
        return {worker for worker, handle in here.items() if handle is None}

    def _claim(self, name: str, *, again: bool) -> bool:
        handle = self._lock(name, again)
        if handle is None:
            return False
        self._held[name] = handle, time.monotonic()
        if (
            self._work.notes / f"{name}.arrow.json"
        ).exists():  # finished between the look and the lock
            self._release(name)
            return False
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{self._work.worker} {next(self._number)}".encode(), 0)
        return True

    def _lock(self, name: str, again: bool) -> int | None:
        """The locked claim of `name`; with `again` one beside the claim of another, if that has
        been seen for long enough."""
        for level in itertools.count():
            path = self._work.notes / f"{name}.claim{level}"
            handle = _locked(path)
            if handle is not None:
                return handle
            holder, now = path.read_text(), time.monotonic()
            met, since = self._seen.get((name, level), (None, now))
            if met != holder:
                self._seen[name, level] = holder, (since := now)
            if not again or now - since < self._wait():
                return None

    def _release(self, name: str) -> float:
        """Give a claim back; since when it was held."""
        handle, since = self._held.pop(name)
        _unlock(handle)
        return since

    def _wait(self) -> float:
        if self._patience is not None:
            return self._patience
        return max(LEAST_PATIENCE_SECONDS, 2 * max(part["slowest"] for part in self._work.parts()))

    def _drop_damaged(self) -> list[int]:
        """Shards that are not what their notes say: nobody has finished them after all."""
        bad = [index for index in range(self.count) if not self._work.has(index)]
        for index in bad:
            self._work.drop(index)
        return bad


def each(claims: Alone | Claims) -> Iterator[int]:
    """Shard after shard, each claimed when the one before is written."""
    while claims.more():
        yield from iter(claims.take, None)


def _shard(index: int) -> str:
    return f"part-{index:05d}"


def _locked(path: Path) -> int | None:
    """The open file, locked; None: another process holds it."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _unlock(handle: int) -> None:
    fcntl.flock(
        handle, fcntl.LOCK_UN
    )  # a process forked meanwhile holds this handle too, so closing it is not enough
    os.close(handle)


@contextmanager
def joined(path: Path, what: str, last: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file of a work together with others; who leaves last calls `last`. BusyError:
    one is at it alone."""
    handle = _join(path, what)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {_SHARED}".encode(), 0)
        yield
    finally:
        with suppress(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            last()
            path.unlink(missing_ok=True)
        os.close(handle)


def _join(path: Path, what: str) -> int:
    deadline = time.monotonic() + _LEAVING_SECONDS
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 64, 0).decode(errors="replace")
            os.close(handle)
            if _SHARED not in holder or time.monotonic() > deadline:
                next = "wait for it, then run again; or end it, and start all of them with share"
                raise BusyError(
                    what, f"process {holder or 'unknown'} is at this very work alone", next=next
                ) from None
            time.sleep(_POLL_SECONDS)  # one that leaves has it for itself for a moment
            continue
        with suppress(FileNotFoundError):
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        os.close(handle)  # who left removed the file between our open and our lock
