"""The rows of one rollouts version: which there are, in which order, with which seeds; and shards
built of finished rows.

A row's seed is a hash of (recipe seed, iteration, group_id, sample_index), so shards, order,
restarts and the number of workers change nothing. Rows stand prompt by prompt, sample by sample.
List columns are built from flat buffers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from quiver.schemas import rollouts
from quiver.schemas.fields import per_token, token_ids
from quiver.schemas.manifest import canonical
from quiver.stages.generate.engine import Completion, Request


def row_seed(seed: int, iteration: int, group_id: str, sample_index: int) -> int:
    """The 63-bit seed of one row, the same on every machine."""
    return (
        int.from_bytes(
            hashlib.sha256(canonical([seed, iteration, group_id, sample_index])).digest()[:8]
        )
        >> 1
    )


@dataclass(frozen=True)
class Rows:
    """All rows to make. Row r is sample r % samples of prompt r // samples."""

    prompts: pa.Table
    """[prompts] with group_id and prompt_ids, without the dropped ones."""
    samples: int
    seed: int
    iteration: int
    prefix: str
    """The run_key's first 8 digits: what rollout ids start with."""

    def __len__(self) -> int:
        return self.prompts.num_rows * self.samples

    def requests(self, indices: Iterable[int]) -> Iterator[Request]:
        """One request for each row index, made as it is taken."""
        offsets, values = self._prompt_ids.offsets.to_numpy(), self._prompt_ids.values.to_numpy()
        for index in indices:
            prompt, sample = divmod(index, self.samples)
            ids = values[offsets[prompt] : offsets[prompt + 1]]
            yield Request(
                index, ids, row_seed(self.seed, self.iteration, self._groups[prompt], sample)
            )

    @cached_property
    def _prompt_ids(self) -> pa.ListArray:
        return self.prompts.column("prompt_ids").combine_chunks()

    @cached_property
    def _groups(self) -> list[str]:
        return self.prompts.column("group_id").to_pylist()

    def rollout_ids(self, start: int, stop: int) -> list[str]:
        """Ids of rows start … stop - 1."""
        pairs = (divmod(index, self.samples) for index in range(start, stop))
        return [f"{self.prefix}-{self._groups[prompt]}-{sample}" for prompt, sample in pairs]

    def table(
        self, start: int, completions: list[Completion], texts: list[str], temperature: float
    ) -> pa.Table:
        """rollouts/1 of the rows from `start` on: one completion a row, in the order of their
        indices. [rows]"""
        stop = start + len(completions)
        prompt, sample = np.divmod(np.arange(start, stop), self.samples)
        requests = self.requests(range(start, stop))
        columns = [
            pa.array(self.rollout_ids(start, stop), pa.string()),
            pa.array([self._groups[each] for each in prompt], pa.string()),
            pa.array(sample, pa.int32()),
            self._prompt_ids.take(pa.array(prompt)),
            _lists([c.completion_ids for c in completions], np.int32, token_ids("completion_ids")),
            _lists([c.logprobs for c in completions], np.float32, per_token("old_logprobs")),
            pa.array([c.finish_reason for c in completions], pa.string()),
            pa.array([c.stop_reason for c in completions], pa.string()),
            pa.array(texts, pa.string()),
            pa.array(np.full(len(completions), temperature), pa.float32()),
            pa.array([request.seed for request in requests], pa.int64()),
        ]
        return pa.table(columns, schema=rollouts.SCHEMA)


def _lists(arrays: list[np.ndarray], dtype: type, field: pa.Field) -> pa.ListArray:
    """Values + offsets of a ragged column, from one array a row."""
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=field.type)
