"""Score rows of many requests together. Rows are collected for a moment and scored in a thread;
each request gets its own answers. Look here for the reward server's limits.

A row gets what the reward stage would write for it: parts, weights, clip, overlong penalty. A null
means "not scored".
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from quiver.schemas.errors import BusyError, NumericError
from quiver.stages.reward import tables
from quiver.stages.reward.scoring import Scorer
from quiver.stages.reward.servers.dialects.rows import Row, Scored, as_batch
from quiver.stages.reward.shards import Allowance, score_all
from quiver.stages.reward.stage import Config


class Limits(NamedTuple):
    """Limits of the server: `rows` per batch, `wait` seconds for a batch to fill, and most `queued`
    rows. `bytes` of a request's body, number of `headers` and their bytes. Seconds for the headers
    and then for the body to arrive. `connections` at a time."""

    rows: int = 256
    wait: float = 0.005
    queued: int = 20_000
    bytes: int = 64 * 1024 * 1024
    headers: int = 100
    header_bytes: int = 16 * 1024
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    connections: int = 512


class Batcher:
    """Collects rows of requests that arrive together and scores them in a thread, one batch at a
    time."""

    def __init__(self, score: Callable[[list[Row]], list[Scored]], limits: Limits) -> None:
        self._score = score
        self._limits = limits
        self._rows: asyncio.Queue[tuple[Row, asyncio.Future[Scored]]] = asyncio.Queue()

    async def score(self, rows: list[Row]) -> list[Scored]:
        """Return the result of each row, in order. Raises BusyError if too many rows wait, and
        anything that scoring raises."""
        num_waiting = self._rows.qsize()
        if num_waiting + len(rows) > self._limits.queued:
            raise BusyError(
                "reward server", f"{num_waiting} rows are already waiting", next="ask again later"
            )
        futures = [asyncio.get_running_loop().create_future() for _ in rows]
        for waiting in zip(rows, futures, strict=True):
            self._rows.put_nowait(waiting)
        return await asyncio.gather(*futures)

    @asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Score while the application runs."""
        work = asyncio.create_task(self.work())
        yield
        work.cancel()

    async def work(self) -> None:
        """Score until the task is cancelled. Cancelling does not wait for the current batch."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="score")
        try:
            while True:
                batch = [await self._rows.get()]
                if self._rows.qsize() + 1 < self._limits.rows:
                    await asyncio.sleep(self._limits.wait)
                while len(batch) < self._limits.rows and not self._rows.empty():
                    batch.append(self._rows.get_nowait())
                # rows of different requests may have the same id, and scorers tell rows by it
                times = Counter[str]()
                alike: dict[tuple[frozenset[str], int], list[Any]] = {}
                for row, future in batch:
                    key = frozenset(row.columns), times[row.id]
                    times[row.id] += 1
                    alike.setdefault(key, []).append((row, future))
                for waiting in alike.values():
                    rows, futures = zip(*waiting, strict=True)
                    try:
                        outcomes = await asyncio.get_running_loop().run_in_executor(
                            thread, self._score, list(rows)
                        )
                    except Exception as error:
                        outcomes = [error] * len(rows)
                    for future, outcome in zip(futures, outcomes, strict=True):
                        if future.done():  # the request was given up
                            continue
                        if isinstance(outcome, Exception):
                            future.set_exception(outcome)
                        else:
                            future.set_result(outcome)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def score_rows(config: Config, scorers: list[Scorer], rows: list[Row]) -> list[Scored]:
    """Score rows that have the same columns, and different ids, as the [reward] section and its
    stage do. Raises ConfigError if a scorer needs a missing column."""
    for scorer in scorers:
        scorer.require([*rows[0].columns])
    batch = as_batch(rows)
    ((_, parts_of),) = score_all(scorers, [(0, batch)], Allowance(math.inf))
    scored = []
    for index, row in enumerate(rows):
        parts = {name: scorer_parts[index] for name, scorer_parts in parts_of.items()}
        errors = [
            f"{name}: {part.error}" if len(parts) > 1 else part.error
            for name, part in parts.items()
            if part.error is not None
        ]
        extra = {
            name: _without_halves(json.loads(part.extra))
            for name, part in parts.items()
            if part.extra is not None
        }
        reward = None
        if config.overlong and row.completion_ids is None:
            errors.append("overlong counts completion_ids, which the request lacks")
        else:
            try:
                columns = {name: [part] for name, part in parts.items()}
                num_tokens = len(row.completion_ids or ())
                columns, (reward,) = tables.weigh_rows(config, columns, [num_tokens])
                parts = {name: part for name, (part,) in columns.items()}
            except NumericError as error:
                errors.append(error.message)
        numbers = {name: part.value for name, part in parts.items()}
        scored.append(Scored(reward, "; ".join(errors) or None, numbers, extra))
    return scored


def _without_halves(extra: Any) -> Any:
    """Replace half characters, such as cut emoji, which no answer can hold."""
    return json.loads(json.dumps(extra, ensure_ascii=False).encode(errors="replace"))
