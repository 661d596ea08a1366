"""All scorers at once: each in a thread of its own, through one shard after the other, and not more
than AHEAD shards at a time.

A failed row is counted when it is known; when more have failed than are allowed, nothing further is
scored.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from .scoring import Batch, Part, Scorer

AHEAD = 2  # shards that are being scored at a time


class TooMany(Exception):
    """More rows failed than are allowed."""


class Allowance:
    """How many rows may fail. `notice` is called from any thread, for a row as often as one
    likes."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.failed: set[str] = set()
        self.first: tuple[str, str, str] | None = None
        """Function, rollout_id and error of the first that was told."""
        self._lock = threading.Lock()

    def notice(self, name: str, rollout_id: str, error: str) -> None:
        """A row failed. TooMany as soon as that is one too many."""
        with self._lock:
            self.first = self.first or (name, rollout_id, error)
            self.failed.add(rollout_id)
            if len(self.failed) > self.most:
                raise TooMany


class _Thread:
    """A thread in which one scorer scores batches in order. A daemon: it must not keep a process
    that was told to end."""

    def __init__(self, scorer: Scorer, allowance: Allowance) -> None:
        self._scorer, self._allowance = scorer, allowance
        self._batches: queue.SimpleQueue[tuple[Batch, Future] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name=f"score {scorer.name}").start()

    def submit(self, batch: Batch) -> Future[list[Part]]:
        future: Future[list[Part]] = Future()
        self._batches.put((batch, future))
        return future

    def stop(self) -> None:
        self._batches.put(None)

    def _work(self) -> None:
        while (found := self._batches.get()) is not None:
            batch, future = found
            try:
                parts = self._scorer.score(batch)
                for rollout, part in zip(batch["rollout_ids"], parts, strict=True):
                    if part.error is not None:
                        self._allowance.notice(self._scorer.name, rollout, part.error)
                future.set_result(parts)
            except BaseException as error:
                future.set_exception(error)


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
    threads = {scorer.name: _Thread(scorer, allowance) for scorer in scorers}
    under_way: list[tuple[int, dict[str, Future[list[Part]]]]] = []

    def finish_first() -> None:
        index, futures = under_way[0]
        waiting = {future for _, each in under_way for future in each.values()}
        while not all(future.done() for future in futures.values()):
            ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            if not all(
                future.done() for future in futures.values()
            ):  # else this shard is done first, whatever the next says
                for future in ended:
                    future.result()
        done(index, {name: future.result() for name, future in futures.items()})
        under_way.pop(0)

    try:
        for index, batch in shards:
            under_way.append(
                (index, {name: thread.submit(batch) for name, thread in threads.items()})
            )
            if len(under_way) == AHEAD:
                finish_first()
        while under_way:
            finish_first()
    finally:
        for thread in threads.values():
            thread.stop()
