"""The rows of one rollouts version (their order, ids and seeds), and tables of finished rows.

A row's seed is a hash of (recipe seed, round, group_id, sample_index), so it does not depend on
shards, order, restarts or the number of workers. Rows are ordered by prompt, then by sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas import rollouts
from quiver.schemas.manifest import canonical
from quiver.schemas.prompts import MEDIA
from quiver.stages.model.media import Medium

from .config import Config
from .engine import Completion, Request


def row_seed(seed: int, round: int, group_id: str, sample_index: int, *turn: int) -> int:
    """Return the 63-bit seed of a row, or of one of its turns; it is the same on every machine."""
    digest = hashlib.sha256(canonical([seed, round, group_id, sample_index, *turn])).digest()
    return int.from_bytes(digest[:8]) >> 1


@dataclass(frozen=True)
class Rows:
    """All rows to make. With n samples per prompt, row r is sample r % n of prompt r // n."""

    prompts: pa.Table
    """[prompts] with group_id and prompt_ids, without the dropped ones."""
    config: Config
    prefix: str
    """First 8 digits of the run key; rollout ids start with it."""

    def __len__(self) -> int:
        return self.prompts.num_rows * self.config.samples_per_prompt

    def requests(self, indices: Iterable[int]) -> Iterator[Request]:
        """Yield one request for each row index, made when it is drawn."""
        for index in indices:
            prompt_ids = self._prompt_ids[index // self.config.samples_per_prompt]
            seed = self.seed(index)
            media = self.media(index)
            yield Request(index, prompt_ids.values.to_numpy(), seed, media=media)

    def media(self, index: int) -> tuple[Medium, ...]:
        """Return the media in a row's prompt, in the order of their positions."""
        if "spans" not in self.prompts.column_names:
            return ()
        row = index // self.config.samples_per_prompt
        files = {name: iter(self.prompts[MEDIA[name]][row].as_py() or ()) for name in MEDIA}
        spans = self.prompts["spans"][row].as_py() or ()
        return tuple(
            Medium(content=next(files[span["modality"]])["bytes"], **span) for span in spans
        )

    def seed(self, index: int, *turn: int) -> int:
        """Return the seed of a row, or of one of its turns."""
        config = self.config
        prompt, sample = divmod(index, config.samples_per_prompt)
        return row_seed(config.seed, config.round, self._groups[prompt], sample, *turn)

    @property
    def rollout_ids(self) -> pa.ChunkedArray:
        """The ids of all rows, in order."""
        return pa.chunked_array([[*map(self.rollout_id, range(len(self)))]], pa.string())

    def rollout_id(self, index: int) -> str:
        """Return the id of a row."""
        prompt, sample = divmod(index, self.config.samples_per_prompt)
        return f"{self.prefix}-{self._groups[prompt]}-{sample}"

    @cached_property
    def _prompt_ids(self) -> pa.ListArray:
        return self.prompts.column("prompt_ids").combine_chunks()

    @cached_property
    def _groups(self) -> list[str]:
        return self.prompts.column("group_id").to_pylist()

    def table(self, start: int, completions: list[Completion], texts: list[str]) -> pa.Table:
        """Return rollouts/1 of the rows from `start` on: one completion per row, ordered by index.
        [rows]"""
        records = [
            {**completion._asdict(), "old_logprobs": completion.logprobs, "completion_text": text}
            for completion, text in zip(completions, texts, strict=True)
        ]
        return self._with_prompts(start, records, rollouts.SCHEMA)

    def empty_table(self) -> pa.Table:
        """Return a table without rows."""
        if self.config.turns is not None:
            return self.table_of_episodes(0, [])
        return self.table(0, [], [])

    def table_of_episodes(self, start: int, records: list[dict[str, Any]]) -> pa.Table:
        """Return rows from `start` on, made of each episode's `record`: rollouts/2, rollouts/3
        if they may show pictures, or rollouts/4 if they may play clips. [rows]"""
        schema = rollouts.OF_PICTURES if self.config.turns.max_images else rollouts.OF_TURNS
        if self.config.turns.max_audio:
            schema = rollouts.OF_CLIPS
        return self._with_prompts(start, records, schema)

    def _with_prompts(
        self, start: int, records: list[dict[str, Any]], schema: pa.Schema
    ) -> pa.Table:
        """Return the rows from `start` on, with the columns that are known without an answer."""
        indices = range(start, start + len(records))
        prompts, samples = np.divmod(np.array(indices, np.int64), self.config.samples_per_prompt)
        temperatures = np.full(len(indices), self.config.sampling.temperature)
        columns = {
            "rollout_id": [self.rollout_id(index) for index in indices],
            "group_id": [self._groups[prompt] for prompt in prompts],
            "sample_index": pa.array(samples, pa.int32()),
            "prompt_ids": self._prompt_ids.take(pa.array(prompts)),
            "temperature": pa.array(temperatures, pa.float32()),
            "seed": [self.seed(index) for index in indices],
        }
        for name in schema.names:
            if name not in columns:
                columns[name] = [record[name] for record in records]
        return pa.table(columns, schema=schema)
