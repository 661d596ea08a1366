"""Shards in the making: rows come in any order, a shard is written as soon as its last row is
there.

The size of a shard is a runtime knob; an unfinished attempt's shards keep the size that they have,
so a restart with another size still takes them up, and so does every process that shares the work.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from quiver.stages.common.claims import each
from quiver.stages.common.work import Work
from quiver.stages.generate.engine import Completion, Engine, Limits, checked

from .handout import Handout
from .rows import Rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SECONDS_BETWEEN_LINES = 2.0
log = logging.getLogger(__name__)


class Shards:
    """All shards of one version: which are finished, which wait for rows."""

    tokenizer: PreTrainedTokenizerFast
    """Makes completion_text; set before rows come."""

    def __init__(self, work: Work, rows: Rows, size: int, temperature: float) -> None:
        self.work, self.rows, self.temperature = work, rows, temperature
        self.size = work.plan(size)
        self._count = max(
            1, -(-len(rows) // self.size)
        )  # a version of no rows still has its one file
        self.claims = work.claims(self._count)
        self._open: dict[int, dict[int, Completion]] = {}
        self._made_tokens = 0

    def _range(self, index: int) -> range:
        return range(index * self.size, min((index + 1) * self.size, len(self.rows)))

    def finish_empty(self) -> None:
        """Write what needs no engine: the shard of a version without rows."""
        for index in each(self.claims) if not len(self.rows) else ():
            self.work.write(index, self.rows.table(0, [], [], self.temperature))

    def take(self, engine: Engine, limits: Limits) -> None:
        """Let the engine make what is not finished; write each shard when it is whole; a line of
        progress every two seconds."""
        requests = Handout(self.rows, self._range, self.claims, getattr(engine, "ahead", 1))
        unfinished = self.claims.unfinished()
        if len(unfinished) < self._count:
            log.info(
                "taking up %d of %d shards that are finished",
                self._count - len(unfinished),
                self._count,
            )
        total = sum(len(self._range(index)) for index in unfinished)
        start = spoken = time.monotonic()
        while self.claims.more():
            completions = (
                checked(engine.generate(requests), requests, limits)
                if requests.open()
                else iter(())
            )
            while completion := self._next(completions):
                self._add(completion)
                if time.monotonic() - spoken > _SECONDS_BETWEEN_LINES:
                    self.work.look()
                    self._say(total, start)
                    spoken = time.monotonic()
        self._say(total, start)

    def _next(self, completions: Iterator[Completion]) -> Completion | None:
        with self.work.phase("generate"):
            return next(completions, None)

    def _say(self, total: int, start: float) -> None:
        """Rows that are there by now, whoever made them, and the speed of this process."""
        going = {index: len(self._open.get(index, ())) for index in self.claims.unfinished()}
        done = total - sum(len(self._range(index)) - rows for index, rows in going.items())
        log.info(
            "generate: %d of %d rows, %.0f tokens/s",
            done,
            total,
            self._made_tokens / max(time.monotonic() - start, 1e-9),
        )

    def _add(self, completion: Completion) -> None:
        self._made_tokens += len(completion.completion_ids)
        self.work.told["tokens"] = self._made_tokens
        index = completion.index // self.size
        waiting = self._open.setdefault(index, {})
        waiting[completion.index] = completion
        if len(waiting) == len(self._range(index)):
            with self.work.phase("write"):
                self._write(index, [waiting[row] for row in self._range(index)])
            del self._open[index]

    def _write(self, index: int, completions: list[Completion]) -> None:
        ids = [completion.completion_ids for completion in completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        self.work.write(
            index, self.rows.table(self._range(index).start, completions, texts, self.temperature)
        )

    def summary(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Metrics over all rows, and how many ended how. The speed is over those made now, summed
        over processes."""
        reasons: Counter[str] = Counter()
        lengths = [np.empty(0, np.int64)]
        for index in range(self._count):
            table = self.work.read(index)
            reasons.update(table.column("finish_reason").to_pylist())
            lengths.append(pc.list_value_length(table.column("completion_ids")).to_numpy())
        all_lengths = np.concatenate(lengths)
        speeds = [
            part["tokens"] / max(part["seconds"]["generate"], 1e-9)
            for part in self.work.parts()
            if part.get("tokens")
        ]
        return {
            "tokens": int(all_lengths.sum()),
            "tokens_per_second": round(sum(speeds), 1),
            "mean_completion_tokens": round(float(all_lengths.mean()), 3)
            if len(all_lengths)
            else 0.0,
        }, dict(sorted(reasons.items()))
