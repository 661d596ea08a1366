"""Progress of a stage, parsed from the log lines of its child process.

progress = StageProgress(call.config)
progress.hear("generate: 256 of 512 rows, 900 tokens/s")
progress.words()        # 256 of 512 rows, 900 tokens/s, 40 s left
"""

from __future__ import annotations

import re
import time
from typing import Any

_ROWS = re.compile(
    r"(?:generate|prompts|rewards|logprobs): (shard )?(\d+) of (\d+)\b"
    r"(?: rows, (\d+) tokens/s)?(?:  \[(.+)\])?"
)
_STEP = re.compile(r"step (\d+): (?:(\d+) of (\d+) micro-batches|loss)")


class StageProgress:
    """Work done and total of one stage. `config` is the stage's config."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._steps = config.get("epochs", 1) * config.get("minibatches", 1)
        self._first_step: int | None = None
        self._started_at = time.monotonic()
        self._first: tuple[float, float] | None = None
        """Time of the first progress line, and the work done by then."""
        self._latest_at = 0.0
        self._speeds: dict[str | None, int] = {}
        """Tokens/s of each process of the stage, by the name at the end of its lines."""
        self.done = 0.0
        self.total: float | None = None
        """Total of `done`; None before the first progress line."""
        self.unit = "rows"
        self.line = ""
        """The last progress line."""

    def hear(self, line: str) -> None:
        """Parse a line; lines without progress are ignored."""
        rows = _ROWS.match(line)
        step = _STEP.match(line)
        if rows:
            # With several processes, each counts its current shard and all finished rows.
            self.done = max(float(rows[2]), self.done if rows[5] else 0.0)
            self.total = float(rows[3])
            self.unit = "shards" if rows[1] else "rows"
            if rows[4]:
                self._speeds[rows[5]] = int(rows[4])
        elif step:
            number = int(step[1])
            if self._first_step is None:
                self._first_step = number
            share = int(step[2]) / int(step[3]) if step[2] else 1
            self.done = number - self._first_step + share
            self.total = self._steps
            self.unit = "steps"
        else:
            return
        self.line = line
        self._latest_at = time.monotonic()
        if self._first is None:
            self._first = (self._latest_at, self.done)

    def words(self) -> str:
        """Return rows done of all, tokens/s and time left, as far as they are known."""
        if self.total is None or self._first is None:
            return f"{in_words(time.monotonic() - self._started_at)} so far"
        words = [f"{int(self.done):,} of {int(self.total):,} {self.unit}"]
        if self._speeds:
            words.append(f"{sum(self._speeds.values())} tokens/s")
        first_at, first_done = self._first
        if self.done > first_done:
            pace = (self._latest_at - first_at) / (self.done - first_done)
            due_at = self._latest_at + pace * (self.total - self.done)
            words.append(f"{in_words(max(0.0, due_at - time.monotonic()))} left")
        return ", ".join(words)


def only_counts(line: str) -> bool:
    """True if a line shows only how far its stage is.

    >>> only_counts("rewards: 256 of 512 rows"), only_counts("step 0: loss 0.1, grad_norm 1.0")
    (True, False)
    """
    step = _STEP.match(line)
    return _ROWS.match(line) is not None or (step is not None and step[2] is not None)


def in_words(seconds: float) -> str:
    """Return a duration for people.

    >>> in_words(9.6), in_words(75), in_words(7300)
    ('10 s', '1 min 15 s', '2 h 2 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
