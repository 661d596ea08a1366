"""The rows of one scoring as they are dealt out: how many a call has, which are called alone, and
what came of them.

job = Job(function, columns, rows=256, notice=…)
job.take(grown=0, workers=2)      # [0]: the first call of a function in a process has one row
job.take(grown=1, workers=2)      # [1, …, 8]: then they grow, up to about a second
job.spoiled([1, …, 8], Late())    # these are called alone, unless they were one: that one failed
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quiver.stages.reward.pool.calls import late
from quiver.stages.reward.pool.process import Ended, Late
from quiver.stages.reward.scoring import Part

BATCH_SECONDS = 3.0
_AIM_SECONDS = 1.0  # of one call
_LEAST_SECONDS = 0.005  # of a call that is worth its way
_GROWTH = 8


@dataclass(frozen=True)
class About:
    """What a worker found out of a function. `takes` is None where it takes every column."""

    takes: frozenset[str] | None
    needs: frozenset[str]
    waits: bool
    fingerprint: str


@dataclass(eq=False)
class Function:
    """A reward function as a recipe names it, and what is learned of it on the way."""

    use: str
    name: str
    arguments: dict[str, Any]
    extra: bool = False
    seconds: float = 30.0
    """Limit of a row."""
    at_once: int = 64
    """Rows of an async function that wait together."""
    rows: int = 256
    """Most rows a call."""
    about: About | None = None
    spent: float = 0.0
    """Seconds in calls, summed over processes."""
    row_seconds: float | None = None
    """Of the last call."""
    now: int = field(init=False)
    """Most rows a call as long as calls take longer than foreseen."""
    key: int = field(default_factory=count().__next__, init=False)
    """Tells it from others of its name."""

    def __post_init__(self) -> None:
        self.now = self.rows

    @property
    def batch_seconds(self) -> float:
        return min(self.seconds, BATCH_SECONDS)


class Job:
    """The rows of one `run`: those to be called, those to be called alone, and what came of the
    others."""

    def __init__(
        self,
        function: Function,
        columns: dict[str, list[Any]],
        rows: int,
        notice: Callable[[int, Part], None],
    ):
        self.function, self.columns, self.notice = function, columns, notice
        self.parts: list[Part | None] = [None] * rows
        self.next, self.alone, self.running, self.missing = 0, deque[int](), 0, rows
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.began = time.monotonic()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Rows that no worker has."""
        return len(self.parts) - self.next + len(self.alone)

    @property
    def open(self) -> bool:
        """Whether there is something to take. A job without rows is for loading its function."""
        return self.waiting > 0 or not (self.parts or self.running)

    def seconds(self) -> float:
        """How long one process would take for the waiting rows; where that is not known, how long
        they have waited."""
        known = self.function.row_seconds
        return (
            self.waiting * known
            if known is not None and self.running
            else time.monotonic() - self.began
        )

    def take(self, grown: int, workers: int) -> list[int]:
        """The next rows for one of `workers` processes, whose last call had `grown` rows."""
        if self.alone:
            return [self.alone.popleft()]
        start, function, rest = self.next, self.function, len(self.parts) - self.next
        size = min(rest, function.now, function.rows if grown else 1)
        if grown and not function.about.waits:
            speed = 1 / max(function.row_seconds, 1e-9)
            share = (
                max(math.ceil(rest / (2 * workers)), int(_LEAST_SECONDS * speed))
                if workers > 1
                else rest
            )
            aim = min(_AIM_SECONDS, function.batch_seconds / 3)
            size = max(1, min(size, grown * _GROWTH, share, int(aim * speed)))
        self.next += size
        return list(range(start, start + size))

    def put(self, row: int, part: Part) -> None:
        """The part of a row; told where it is an error."""
        with self._lock:
            if self.parts[row] is not None:
                return
            self.parts[row], self.missing = part, self.missing - 1
        if part.error is not None:
            self.notice(row, part)

    def spoiled(self, rows: list[int], error: Late | Ended) -> None:
        """A call took too long or ended its process: what it left is called row by row, or was one
        row, which then failed."""
        function, left = self.function, [row for row in rows if self.parts[row] is None]
        if len(rows) > 1:
            self.alone += left
            function.now = max(1, len(rows) // 4)
        elif left:
            function.now = function.rows  # it was this row, and not that calls are too large
            how = (
                late(function.seconds)
                if isinstance(error, Late)
                else Part(error=f"WorkerEnded: its process ended {error}")
            )
            self.put(left[0], how)
