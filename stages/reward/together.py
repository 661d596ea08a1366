"""All scorers at once: each in a thread of its own, through one shard after the other, and not more
than AHEAD shards at a time.

A failed row is counted when it is known; when more have failed than are allowed, nothing further is
scored.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from .scoring import Batch, Part, Scorer

AHEAD = 2  # shards that are being scored at a time
Batches = queue.SimpleQueue[tuple[Batch, Future[list[Part]]] | None]
"""What one scorer is to score, with the future of its parts; None at the end."""


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
    batches_of: dict[str, Batches] = {scorer.name: queue.SimpleQueue() for scorer in scorers}
    for scorer in scorers:
        # a daemon: it must not keep a process that was told to end
        threading.Thread(
            target=_score_batches,
            args=(scorer, batches_of[scorer.name], allowance),
            daemon=True,
            name=f"score {scorer.name}",
        ).start()
    under_way: deque[tuple[int, dict[str, Future[list[Part]]]]] = deque()

    def finish_first() -> None:
        index, futures = under_way[0]
        pending = {future for _, by_name in under_way for future in by_name.values()}
        while not all(future.done() for future in futures.values()):
            ended, pending = wait(pending, return_when=FIRST_COMPLETED)
            # where this shard is done, it is done first, whatever the next says
            if not all(future.done() for future in futures.values()):
                for future in ended:
                    future.result()
        done(index, {name: future.result() for name, future in futures.items()})
        under_way.popleft()

    try:
        for index, batch in shards:
            futures = {name: Future() for name in batches_of}
            for name, batches in batches_of.items():
                batches.put((batch, futures[name]))
            under_way.append((index, futures))
            if len(under_way) == AHEAD:
                finish_first()
        while under_way:
            finish_first()
    finally:
        for batches in batches_of.values():
            batches.put(None)


def _score_batches(scorer: Scorer, batches: Batches, allowance: Allowance) -> None:
    for batch, future in iter(batches.get, None):
        try:
            parts = scorer.score(batch)
            for rollout_id, part in zip(batch["rollout_ids"], parts, strict=True):
                if part.error is not None:
                    allowance.notice(scorer.name, rollout_id, part.error)
            future.set_result(parts)
        except BaseException as error:
            future.set_exception(error)
