"""All scorers at once: each in a thread of its own, through one shard after the other, and not more
than AHEAD shards at a time.

A failed row is counted when it is known; when more have failed than are allowed, nothing further is
scored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from .scoring import Batch, Part, Scorer

AHEAD = 2  # shards that are being scored at a time
Batches = queue.SimpleQueue[tuple[int, Batch] | None]
"""What one scorer is to score, by the shard's index; None at the end."""
Outcomes = queue.SimpleQueue[tuple[int, str, list[Part] | BaseException]]
"""Index of the shard, name of the scorer, and its parts or what it raised; as they come."""


class TooMany(Exception):
    """More rows failed than are allowed."""


class Allowance:
    """How many rows may fail. `notice` is called from any thread, for a row as often as one
    likes."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.failed: set[str] = set()
        self.first: tuple[str, str, str] | None = None
        """Function, rollout_id and error of the first that was noticed."""
        self._lock = threading.Lock()

    def notice(self, name: str, rollout_id: str, error: str) -> None:
        """A row failed. TooMany as soon as that is one too many."""
        with self._lock:
            self.first = self.first or (name, rollout_id, error)
            self.failed.add(rollout_id)
            if len(self.failed) > self.most:
                raise TooMany


def score_all(
    scorers: list[Scorer],
    shards: Iterable[tuple[int, Batch]],
    allowance: Allowance,
    done: Callable[[int, dict[str, list[Part]]], Any],
) -> None:
    """Score each shard's batch (none of them empty); `done` gets its index and each scorer's parts,
    in order of shards.

    What a scorer raises, this raises at once, and TooMany when `allowance` says so; shards that
    were handed over are done.
    """
    outcomes: Outcomes = queue.SimpleQueue()
    batches_of: dict[str, Batches] = {scorer.name: queue.SimpleQueue() for scorer in scorers}
    for scorer in scorers:
        # a daemon: it must not keep a process that was told to end
        threading.Thread(
            target=_score_batches,
            args=(scorer, batches_of[scorer.name], outcomes, allowance),
            daemon=True,
            name=f"score {scorer.name}",
        ).start()
    under_way: dict[int, dict[str, list[Part]]] = {}

    def collect() -> None:
        index, name, outcome = outcomes.get()
        if isinstance(outcome, BaseException):
            raise outcome
        under_way[index][name] = outcome
        first = next(iter(under_way))  # complete before the next, as each scorer goes in order
        if len(under_way[first]) == len(scorers):
            done(first, {scorer.name: under_way[first][scorer.name] for scorer in scorers})
            del under_way[first]

    try:
        for index, batch in shards:
            under_way[index] = {}
            for batches in batches_of.values():
                batches.put((index, batch))
            while len(under_way) == AHEAD:
                collect()
        while under_way:
            collect()
    finally:
        for batches in batches_of.values():
            batches.put(None)


def _score_batches(
    scorer: Scorer, batches: Batches, outcomes: Outcomes, allowance: Allowance
) -> None:
    for index, batch in iter(batches.get, None):
        try:
            parts = scorer.score(batch)
            for rollout_id, part in zip(batch["rollout_ids"], parts, strict=True):
                if part.error is not None:
                    allowance.notice(scorer.name, rollout_id, part.error)
            outcomes.put((index, scorer.name, parts))
        except BaseException as error:
            outcomes.put((index, scorer.name, error))
