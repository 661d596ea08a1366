"""Deal out the rows of one scoring: the size of each call, the rows to call alone, and the results.

job = Job(function, columns, rollout_ids)
job.take((0, 0.0), workers=2)        # range(0, 1): a function's first call in a process
job.take((1, 0.01), workers=2)       # range(1, 9): later ones grow, up to about a second
job.spoiled(range(1, 9), error)      # called alone now; a row that was alone has failed

job = Job(function, columns, rollout_ids, sizes=[4, 4])      # two groups
job.take((0, 0.0), workers=2)        # range(0, 4): each is called by itself
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from typing import Any

from quiver.stages.core.run.user_process import Ended, Late
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.calls import late
from quiver.stages.reward.pool.habits import About
from quiver.stages.reward.scoring import Notice, Part

BATCH_SECONDS = 3.0
"""Longest time of a call on several rows."""
_CALL_SECONDS = 1.0  # target duration of a call
_SHORTEST_CALL_SECONDS = 0.005  # a shorter call costs more to send than to run
_GROWTH = 8


log = logging.getLogger(__name__)


class Function:
    """A reward function of a recipe, and what is learned about it while it runs."""

    def __init__(self, config: FunctionConfig, max_rows: int, notice: Notice) -> None:
        self.config = config
        self.max_rows = max_rows
        """Most rows per call."""
        self.notice = notice
        self.about: About | None = None
        self.seconds = 0.0
        """Seconds in calls so far, summed over processes."""
        self.kills = 0
        """Processes in a row that were killed while they imported it."""
        self.is_told = False
        """True if the log already says that its rows were called one by one."""

    @property
    def batch_seconds(self) -> float:
        """Longest time of a call on several rows."""
        return min(self.config.timeout_seconds, BATCH_SECONDS)

    def tell_done_again(self, num_rows: int, why: str) -> None:
        """Log once that a call on several rows failed and they are called one by one."""
        if not self.is_told:
            self.is_told = True
            log.warning(
                "%s: a call on %d rows failed (%s); after a failed call, its rows are called one "
                "by one",
                self.config.name,
                num_rows,
                why,
            )


class Job:
    """The rows of one `run`: rows to call, rows to call alone, and the parts so far. Any thread may
    use it."""

    def __init__(
        self,
        function: Function,
        columns: dict[str, list[Any]],
        rollout_ids: list[str | None],
        sizes: list[int] | None = None,
    ) -> None:
        """Prepare the rows.

        Args:
            function: Must have its `about`.
            rollout_ids: A row whose id is None is called with the others, but its errors are not
                reported.
            sizes: Number of rows per group, if each group has its own call.
        """
        self.function = function
        self.columns = columns
        self.rollout_ids = rollout_ids
        self.parts: list[Part | None] = [None] * len(rollout_ids)
        self.num_missing = len(rollout_ids)
        """Rows without a part."""
        self.error: BaseException | None = None
        """The first error; `run` raises it."""
        self.done = threading.Event()
        """Set when each row has its part, or there is an error."""
        self._next_row = 0
        self._alone = deque[range]()
        """Calls that are not merged with others."""
        self._of_groups = sizes is not None
        if sizes is not None:
            ends = [0, *itertools.accumulate(sizes)]
            self._alone.extend(range(*group) for group in itertools.pairwise(ends))
            self._next_row = len(rollout_ids)
        self._lock = threading.Lock()

    def take(self, last_call: tuple[int, float], workers: int) -> range:
        """Return the next rows for one of `workers` processes; empty if all are taken.

        Args:
            last_call: Rows and seconds of the process's last call of this function.
        """
        with self._lock:
            if self._alone:
                return self._alone.popleft()
            start = self._next_row
            unasked = len(self.parts) - start
            num_rows, seconds = last_call
            size = self.function.max_rows if num_rows else 1
            if num_rows and not self.function.about.is_async:
                rows_per_second = num_rows / max(seconds, 1e-9)
                longest = min(_CALL_SECONDS, self.function.batch_seconds / 3)
                size = min(size, num_rows * _GROWTH, int(longest * rows_per_second))
                if (
                    workers > 1
                ):  # small last calls, so that all processes end at about the same time
                    shortest = int(_SHORTEST_CALL_SECONDS * rows_per_second)
                    size = min(size, max(math.ceil(unasked / (2 * workers)), shortest))
            self._next_row = min(start + max(1, size), len(self.parts))
            return range(start, self._next_row)

    def put_back(self, rows: range) -> None:
        """Return rows that were taken but not called."""
        with self._lock:
            self._alone.extend(self._calls_alone(rows))

    def is_alone(self, rows: range) -> bool:
        """True if a call on these rows cannot be split further: one row, or one group."""
        return self._of_groups or len(rows) == 1

    def _calls_alone(self, rows: range) -> list[range]:
        if self.is_alone(rows):
            return [rows]
        return [range(row, row + 1) for row in rows if self.parts[row] is None]

    def put(self, row: int, part: Part) -> None:
        """Store the part of a row, unless it has one; an error is reported to the function's
        `notice`."""
        with self._lock:
            if self.parts[row] is not None:
                return
            self.parts[row] = part
            self.num_missing -= 1
        rollout_id = self.rollout_ids[row]
        if part.error is not None and rollout_id is not None:
            self.function.notice(self.function.config.name, rollout_id, part.error)

    def spoiled(self, rows: range, error: Late | Ended) -> None:
        """Handle a call that took too long or ended its process: rows without a part are called one
        by one. A row or group that was alone has failed."""
        why = f"its process {error}"
        if not self.is_alone(rows):
            self.function.tell_done_again(len(rows), why)
            self._alone += self._calls_alone(rows)
            return
        part = Part(error=f"WorkerEnded: {why}")
        if isinstance(error, Late):
            part = late(self.function.config.timeout_seconds)
        for row in rows:
            self.put(row, part)
