"""The rows of one scoring as they are dealt out: how many a call has, which are called alone, and
what came of them.

    job = Job(function, columns, num_rows=256, notice=…)
    job.take(largest_call=0, workers=2)      # [0]: a function's first call in a process has one row
    job.take(largest_call=1, workers=2)      # [1, …, 8]: later ones grow, up to about a second
    job.spoiled([1, …, 8], Late())           # called alone now; a row that was alone has failed
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.calls import About, late
from quiver.stages.reward.pool.process import Ended, Late
from quiver.stages.reward.scoring import Part

BATCH_SECONDS = 3.0
_CALL_SECONDS = 1.0  # what a call should take
_SHORTEST_CALL_SECONDS = 0.005  # a shorter one is not worth its way
_GROWTH = 8


@dataclass(eq=False)
class Function:
    """A reward function as a recipe names it, and what is learned of it on the way."""

    config: FunctionConfig
    max_rows: int = 256
    """Most rows a call."""
    about: About | None = None
    seconds: float = 0.0
    """In calls, summed over processes."""
    row_seconds: float = 0.0
    """Of the last call."""
    rows_now: int = field(init=False)
    """Most rows a call, as long as calls take longer than foreseen."""
    key: int = field(default_factory=count().__next__, init=False)
    """Tells it from others of its name."""

    def __post_init__(self) -> None:
        self.rows_now = self.max_rows

    @property
    def batch_seconds(self) -> float:
        """Longest time of a call on several rows."""
        return min(self.config.timeout_seconds, BATCH_SECONDS)


class Job:
    """The rows of one `run`: those to be called, those to be called alone, and what came of the
    others. A job without rows has its function loaded."""

    def __init__(
        self,
        function: Function,
        columns: dict[str, list[Any]],
        num_rows: int,
        notice: Callable[[int, Part], None],
    ):
        self.function = function
        self.columns = columns
        self.notice = notice
        self.parts: list[Part | None] = [None] * num_rows
        self.error: BaseException | None = None
        self.running = 0
        """Calls under way."""
        self.missing = num_rows
        self.done = threading.Event()
        self._next_row = 0
        self._alone = deque[int]()
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether there is something to take."""
        if not self.parts:
            return not self.running
        return self._next_row < len(self.parts) or bool(self._alone)

    def take(self, largest_call: int, workers: int) -> list[int]:
        """The next rows for one of `workers` processes, where the largest call of this function had
        `largest_call` rows."""
        if self._alone:
            return [self._alone.popleft()]
        function = self.function
        start = self._next_row
        unasked = len(self.parts) - start
        size = min(unasked, function.rows_now, function.max_rows if largest_call else 1)
        if largest_call and not function.about.is_async:
            rows_per_second = 1 / max(function.row_seconds, 1e-9)
            seconds = min(_CALL_SECONDS, function.batch_seconds / 3)
            size = min(size, largest_call * _GROWTH, int(seconds * rows_per_second))
            if workers > 1:  # the last calls are small, so that all workers end at about one time
                shortest = int(_SHORTEST_CALL_SECONDS * rows_per_second)
                size = min(size, max(math.ceil(unasked / (2 * workers)), shortest))
            size = max(1, size)
        self._next_row += size
        return list(range(start, start + size))

    def put(self, row: int, part: Part) -> None:
        """The part of a row; `notice` hears of an error."""
        with self._lock:
            if self.parts[row] is not None:
                return
            self.parts[row] = part
            self.missing -= 1
        if part.error is not None:
            self.notice(row, part)

    def spoiled(self, rows: list[int], error: Late | Ended) -> None:
        """A call took too long or ended its process: the rows without a part are called one by one;
        a row that was alone has failed."""
        function = self.function
        unanswered = [row for row in rows if self.parts[row] is None]
        if len(rows) > 1:
            self._alone += unanswered
            function.rows_now = max(1, len(rows) // 4)
        elif unanswered:
            function.rows_now = function.max_rows  # it was this row, and not that calls are large
            if isinstance(error, Late):
                part = late(function.config.timeout_seconds)
            else:
                part = Part(error=f"WorkerEnded: its process ended {error}")
            self.put(unanswered[0], part)
