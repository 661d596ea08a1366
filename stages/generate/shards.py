"""Collect finished rows, in any order, and write each shard as soon as its last row is finished.

The shard size is a runtime setting. The shards of unfinished work keep their size, so a
restart with another size still uses them, and so does every process that shares the work.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import printable
from quiver.stages.core.store.writer import Writer
from quiver.stages.turns.statistics import first_failure, measure

from .engine import Engine, errors_of_own
from .requests import Requests
from .rows import Rows

_SECONDS_BETWEEN_LINES = 2.0
log = logging.getLogger(__name__)


class Shards:
    """All shards of one version: finished shards, and shards that wait for rows."""

    def __init__(self, writer: Writer, rows: Rows) -> None:
        self._writer = writer
        self._rows = rows
        self._size = writer.rows_per_shard(rows.config.rows_in_shard(len(rows)))
        # A version without rows still has one file.
        self._count = max(1, -(-len(rows) // self._size))
        self.handout = writer.hand_out(self._count)
        self._waiting: dict[int, dict[int, Any]] = {}
        """Finished rows of each unfinished shard: shard → row → input for `Requests.table`."""
        self._num_tokens = 0
        self._num_made = 0
        """Rows that this process has finished."""

    def take(self) -> range | None:
        """Return the rows of the next shard for this process; None if there is none, at least for
        now."""
        index = self.handout.take()
        return None if index is None else self._range_of(index)

    def make(self, engine: Engine, requests: Requests) -> None:
        """Let the engine make the unfinished shards, and write each one when it is complete.

        Logs a line of progress every two seconds.
        """
        unfinished = self.handout.unfinished()
        num_finished = self._count - len(unfinished)
        if num_finished:
            log.info("reusing %d of %d shards that are already finished", num_finished, self._count)
        num_rows = sum(len(self._range_of(index)) for index in unfinished)
        started_at = time.monotonic()
        logged_at = started_at
        while self.handout.wait_for_work():
            if not requests.open_shard():
                continue
            while not requests.is_done():
                for _ in self._answers(engine, requests):
                    for index, row in requests.finished_rows():
                        self._add(index, row, requests)
                    if time.monotonic() - logged_at > _SECONDS_BETWEEN_LINES:
                        self._writer.stop_if_committed()
                        self._log_progress(num_rows, started_at)
                        logged_at = time.monotonic()
        self._log_progress(num_rows, started_at)

    def _answers(self, engine: Engine, requests: Requests) -> Iterator[None]:
        """Yield after each answer of the engine, and once more when it has no more for now."""
        name = self._rows.config.engine
        with errors_of_own(name):
            completions = iter(engine.generate(requests))
        while True:
            with self._writer.phase("generate"):
                with errors_of_own(name):
                    completion = next(completions, None)
                if completion is None:
                    requests.settle()
            if completion is not None:
                requests.require_completion(completion)
                requests.answer(completion)
            self._num_tokens = self._writer.report_fields["tokens"] = requests.num_tokens
            yield
            if completion is None:
                return

    def summary(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Return metrics over all rows, and the number of rows by finish reason.

        The speed is over the rows made in this run, summed over processes.
        """
        table = pa.concat_tables([self._writer.read(index) for index in range(self._count)])
        num_tokens = pc.sum(pc.list_value_length(table["completion_ids"])).as_py() or 0
        speeds = [
            report["tokens"] / max(report["seconds"].get("generate", 0.0), 1e-9)
            for report in self._writer.reports()
            if report.get("tokens")
        ]
        metrics = {
            "tokens": num_tokens,
            "tokens_per_second": round(sum(speeds), 1),
            "mean_completion_tokens": round(num_tokens / max(len(table), 1), 3),
        }
        if "turns" in table.column_names:
            metrics |= measure(table)
            if metrics["failed"]:
                why = printable(first_failure(table) or "unknown")
                log.warning("%d of %d episodes failed; %s", metrics["failed"], len(table), why)
        reasons = Counter(table["finish_reason"].to_pylist())
        return metrics, dict(sorted(reasons.items()))

    def _range_of(self, index: int) -> range:
        return range(len(self._rows))[index * self._size : (index + 1) * self._size]

    def _add(self, row: int, finished: Any, requests: Requests) -> None:
        index = row // self._size
        rows = self._range_of(index)
        finished_rows = self._waiting.setdefault(index, {})
        finished_rows[row] = finished
        self._num_made += 1
        if len(finished_rows) < len(rows):
            return
        with self._writer.phase("write"):
            in_order = [finished_rows[row] for row in rows]
            self._writer.write(index, requests.table(rows.start, in_order))
        del self._waiting[index]

    def _log_progress(self, num_rows: int, started_at: float) -> None:
        """Log the number of finished rows, made by any process, and this process's speed.

        The speed counts finished rows only, so at first, while most rows are in progress, it would
        be far too low. It is left out until a shard's worth or half of the rows is finished.
        """
        num_missing = sum(
            len(self._range_of(index)) - len(self._waiting.get(index, ()))
            for index in self.handout.unfinished()
        )
        speed = ""
        if self._num_made >= min(self._size, num_rows / 2):
            tokens_per_second = self._num_tokens / max(time.monotonic() - started_at, 1e-9)
            speed = f", {tokens_per_second:.0f} tokens/s"
        log.info("generate: %d of %d rows%s", num_rows - num_missing, num_rows, speed)
