"""The rows of one rollouts version: which there are, in which order, with which seeds; and shards
built of finished rows.

A row's seed is a hash of (recipe seed, iteration, group_id, sample_index), so shards, order,
restarts and the number of workers change nothing. Rows stand prompt by prompt, sample by sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from quiver.schemas import rollouts
from quiver.schemas.manifest import canonical

from .config import Config
from .engine import Completion, Request


def row_seed(seed: int, iteration: int, group_id: str, sample_index: int) -> int:
    """The 63-bit seed of one row, the same on every machine."""
    digest = hashlib.sha256(canonical([seed, iteration, group_id, sample_index])).digest()
    return int.from_bytes(digest[:8]) >> 1


@dataclass(frozen=True)
class Rows:
    """All rows to make. With n samples a prompt, row r is sample r % n of prompt r // n."""

    prompts: pa.Table
    """[prompts] with group_id and prompt_ids, without the dropped ones."""
    config: Config
    prefix: str
    """The run_key's first 8 digits: what rollout ids start with."""

    def __len__(self) -> int:
        return self.prompts.num_rows * self.config.samples_per_prompt

    def requests(self, indices: Iterable[int]) -> Iterator[Request]:
        """One request for each row index, made as it is taken."""
        config = self.config
        for index in indices:
            prompt, sample = divmod(index, config.samples_per_prompt)
            seed = row_seed(config.seed, config.iteration, self._groups[prompt], sample)
            yield Request(index, self._prompt_ids[prompt].values.to_numpy(), seed)

    @cached_property
    def _prompt_ids(self) -> pa.ListArray:
        return self.prompts.column("prompt_ids").combine_chunks()

    @cached_property
    def _groups(self) -> list[str]:
        return self.prompts.column("group_id").to_pylist()

    def table(self, start: int, completions: list[Completion], texts: list[str]) -> pa.Table:
        """rollouts/1 of the rows from `start` on: one completion a row, in the order of their
        indices. [rows]"""
        indices = range(start, start + len(completions))
        prompts, samples = np.divmod(np.array(indices, np.int64), self.config.samples_per_prompt)
        temperatures = np.full(len(completions), self.config.sampling.temperature)
        groups = [self._groups[prompt] for prompt in prompts]
        rollout_ids = [
            f"{self.prefix}-{group}-{sample}" for group, sample in zip(groups, samples, strict=True)
        ]
        columns = {
            "rollout_id": rollout_ids,
            "group_id": groups,
            "sample_index": pa.array(samples, pa.int32()),
            "prompt_ids": self._prompt_ids.take(pa.array(prompts)),
            "completion_ids": [completion.completion_ids for completion in completions],
            "old_logprobs": [completion.logprobs for completion in completions],
            "finish_reason": [completion.finish_reason for completion in completions],
            "stop_reason": [completion.stop_reason for completion in completions],
            "completion_text": texts,
            "temperature": pa.array(temperatures, pa.float32()),
            "seed": [request.seed for request in self.requests(indices)],
        }
        return pa.table(columns, schema=rollouts.SCHEMA)
