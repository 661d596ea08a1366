"""All scorers at once: each in a thread of its own, through one shard after the other, and not more
than AHEAD shards at a time.

A failed row is counted when it is known; when more have failed than are allowed, nothing further is
scored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator

from .scoring import Batch, Part, Scorer

AHEAD = 2  # shards that are being scored at a time


class TooMany(Exception):
    """More rows failed than are allowed."""


class Allowance:
    """How many rows may fail. `notice` is called from any thread, for a row as often as one
    likes."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.failed: dict[str, tuple[str, str]] = {}
        """By rollout_id, in the order in which they were noticed: scorer and error of the first
        failure."""

    def notice(self, name: str, rollout_id: str, error: str) -> None:
        """A row failed. TooMany as soon as that is one too many."""
        self.failed.setdefault(rollout_id, (name, error))  # one step, whatever other threads do
        if len(self.failed) > self.most:
            raise TooMany


def score_all(
    scorers: list[Scorer], shards: Iterable[tuple[int, Batch]], allowance: Allowance
) -> Iterator[tuple[int, dict[str, list[Part]]]]:
    """Score each shard's batch (none of them empty): its index and each scorer's parts, in order of
    shards.

    What a scorer raises, this raises at once, and TooMany when `allowance` says so.
    """
    remaining = iter(shards)
    outcomes = queue.SimpleQueue()
    queues = [queue.SimpleQueue() for _ in scorers]
    for scorer, batches in zip(scorers, queues, strict=True):
        # a daemon: it must not keep a process that was told to end
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
            if len(under_way[index]) == len(scorers):  # before any later one: each goes in order
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
    """Score what comes until it is None; what comes of it, or what it raised, goes to
    `outcomes`."""
    for index, batch in iter(batches.get, None):
        try:
            outcome = scorer.score(batch)
            for rollout_id, part in zip(batch["rollout_ids"], outcome, strict=True):
                if part.error is not None:
                    allowance.notice(scorer.name, rollout_id, part.error)
        except BaseException as error:
            outcome = error
        outcomes.put((index, scorer.name, outcome))
