"""Shards in the making: rows come in any order, a shard is written as soon as its last row is there.

The size of a shard is a runtime knob; an unfinished attempt's shards keep the size that they have, so a restart with another
size still takes them up.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from stages.common.work import Work

from .engine import Completion
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
        self.size = self._size_before() or size
        self.finished = {index for index in range(self._count()) if work.has(index)}
        self._open: dict[int, dict[int, Completion]] = {}
        self._made_tokens = 0

    def _size_before(self) -> int | None:
        """Rows a shard of an earlier attempt, told by any finished shard: its size, or where its rows start."""
        noted = sorted(int(note.name[5:].partition(".")[0]) for note in self.work.notes.glob("part-*.arrow.json"))
        first = next(filter(self.work.has, noted), None)
        if first is None:
            return None
        table = self.work.read(first)
        if first == 0:
            return table.num_rows
        group, sample = table.column("group_id")[0].as_py(), table.column("sample_index")[0].as_py()
        prompt = pc.index(self.rows.prompts.column("group_id"), group).as_py()
        return (prompt * self.rows.samples + sample) // first

    def _count(self) -> int:
        return -(-len(self.rows) // self.size)

    def _range(self, index: int) -> range:
        return range(index * self.size, min((index + 1) * self.size, len(self.rows)))

    def missing(self) -> list[int]:
        """Indices of the rows to make, rising."""
        if self.finished:
            log.info("taking up %d of %d shards that are finished", len(self.finished), self._count())
        return [row for index in range(self._count()) if index not in self.finished for row in self._range(index)]

    def finish_empty(self) -> None:
        """A version of no rows still has its one file."""
        if not len(self.rows):
            self.work.write(0, self.rows.table(0, [], [], self.temperature))

    def take(self, completions: Iterator[Completion]) -> None:
        """Take every completion in; write each shard when it is whole; a line of progress every two seconds."""
        total = len(self.missing())
        done, start, spoken = 0, time.monotonic(), time.monotonic()
        while True:
            with self.work.phase("generate"):
                completion = next(completions, None)
            now = time.monotonic()
            if completion is None or now - spoken > _SECONDS_BETWEEN_LINES:
                speed = self._made_tokens / max(now - start, 1e-9)
                log.info("generate: %d of %d rows, %.0f tokens/s", done, total, speed)
                spoken = now
            if completion is None:
                return
            done, self._made_tokens = done + 1, self._made_tokens + len(completion.completion_ids)
            self._add(completion)

    def _add(self, completion: Completion) -> None:
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
        self.work.write(index, self.rows.table(self._range(index).start, completions, texts, self.temperature))
        self.finished.add(index)

    def summary(self) -> tuple[dict[str, Any], dict[str, int]]:
        """Metrics over all rows (the speed: over those made now), and how many ended how."""
        reasons: Counter[str] = Counter()
        lengths = [np.empty(0, np.int64)]
        for index in range(self._count()):
            table = self.work.read(index)
            reasons.update(table.column("finish_reason").to_pylist())
            lengths.append(pc.list_value_length(table.column("completion_ids")).to_numpy())
        all_lengths = np.concatenate(lengths)
        seconds = self.work.seconds.get("generate", 0.0)
        return {
            "tokens": int(all_lengths.sum()),
            "tokens_per_second": round(self._made_tokens / seconds, 1) if seconds else 0.0,
            "mean_completion_tokens": round(float(all_lengths.mean()), 3) if len(all_lengths) else 0.0,
        }, dict(sorted(reasons.items()))
