"""Run all scorers at once. Each has a thread, goes through the shards in order, and at most AHEAD
shards are scored at a time.

A failed row is counted as soon as it is known. Once more have failed than are allowed, nothing
further is scored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator

from .scoring import Batch, Part, Scorer

AHEAD = 2  # shards scored at a time


class TooMany(Exception):
    """More rows failed than are allowed."""


class Allowance:
    """Number of rows that may fail. `notice` may be called from any thread, and repeatedly for a
    row."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.failed: dict[str, tuple[str, str]] = {}
        """Scorer and error of the first failure by rollout_id, in the order of notice."""

    def notice(self, name: str, rollout_id: str, error: str) -> None:
        """Count a failed row. Raises TooMany as soon as that is one too many."""
        self.failed.setdefault(rollout_id, (name, error))  # atomic, so threads may race
        if len(self.failed) > self.most:
            raise TooMany


def score_all(
    scorers: list[Scorer], shards: Iterable[tuple[int, Batch]], allowance: Allowance
) -> Iterator[tuple[int, dict[str, list[Part]]]]:
    """Score each shard's batch, none of them empty. Yields its index and each scorer's parts, in
    order of shards.

    An exception of a scorer is raised at once, and so is TooMany of `allowance`.
    """
    remaining = iter(shards)
    outcomes = queue.SimpleQueue()
    queues = [queue.SimpleQueue() for _ in scorers]
    for scorer, batches in zip(scorers, queues, strict=True):
        # a daemon thread, so that it does not keep the process alive on exit
        threading.Thread(
            target=_score_batches,
            args=(scorer, batches, outcomes, allowance),
            daemon=True,
            name=f"score {scorer.name}",
        ).start()
    under_way: dict[int, dict[str, list[Part]]] = {}
    try:
        while True:
            while len(under_way) < AHEAD and (shard := next(remaining, None)):
                under_way[shard[0]] = {}
                for batches in queues:
                    batches.put(shard)
            if not under_way:
                return
            index, name, outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            under_way[index][name] = outcome
            # complete before any later shard, since scorers go in order
            if len(under_way[index]) == len(scorers):
                parts = under_way.pop(index)
                yield index, {scorer.name: parts[scorer.name] for scorer in scorers}
    finally:
        for batches in queues:
            batches.put(None)


def _score_batches(
    scorer: Scorer,
    batches: queue.SimpleQueue[tuple[int, Batch] | None],
    outcomes: queue.SimpleQueue[tuple[int, str, list[Part] | BaseException]],
    allowance: Allowance,
) -> None:
    """Score batches until None comes, and put each result or exception into `outcomes`."""
    for index, batch in iter(batches.get, None):
        try:
            outcome = scorer.score(batch)
            for rollout_id, part in zip(batch["rollout_ids"], outcome, strict=True):
                if part.error is not None:
                    allowance.notice(scorer.name, rollout_id, part.error)
        except BaseException as error:
            outcome = error
        outcomes.put((index, scorer.name, outcome))
