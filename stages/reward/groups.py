"""Collect whole groups for functions of scope `group`. A shard may hold only some rows of a group,
and a retry asks only for rows without a reward.

    groups = Groups(rollouts, prompts)
    whole = groups.of(["r-4", "r-9"])       # whole.batch holds every row of their groups
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from quiver.stages.common.store import Version

from . import pictures, tables
from .scoring import Batch


class Whole(NamedTuple):
    """The groups of some rows, one after the other."""

    batch: Batch
    sizes: list[int]
    """Number of rows in each group."""
    rows: list[int]
    """Positions of the rows in the batch."""


class Groups:
    """The groups of a rollouts version. Within each, rows are sorted by `sample_index`."""

    def __init__(self, rollouts: Version, prompts: Version) -> None:
        """The tables are read when groups are first asked for."""
        self._versions = rollouts, prompts

    @cached_property
    def _tables(self) -> tuple[pa.Table, pa.Table]:
        """The rollouts in one chunk, and the prompts."""
        rollouts, prompts = self._versions
        return rollouts.table().combine_chunks(), prompts_of(prompts)

    @cached_property
    def _prompt_rows(self) -> pa.Array:
        """Row of its prompt for each rollout."""
        return tables.join(*self._tables)

    def of(self, rollout_ids: Sequence[str]) -> Whole:
        """Return the whole groups of these rollouts, in order of first mention."""
        rollouts, prompts = self._tables
        ids = rollouts["rollout_id"].combine_chunks()
        groups = rollouts["group_id"].combine_chunks()
        asked = pc.index_in(pa.array(rollout_ids, ids.type), value_set=ids)
        named = groups.take(asked).unique()
        order = pc.index_in(groups, value_set=named)
        places = pa.table(
            {"row": range(len(ids)), "group": order, "sample": rollouts["sample_index"]}
        )
        keys = [("group", "ascending"), ("sample", "ascending"), ("row", "ascending")]
        places = places.filter(pc.is_valid(order)).sort_by(keys)
        rows = places["row"].combine_chunks()
        prompts = prompts.take(self._prompt_rows.take(rows))
        batch = tables.offered(rollouts.take(rows), prompts)
        sizes = pc.value_counts(places["group"]).field("counts").to_pylist()
        return Whole(batch, sizes, pc.index_in(asked.cast(rows.type), value_set=rows).to_pylist())


def prompts_of(prompts: Version) -> pa.Table:
    """Read the columns of prompts that scorers are offered, in one chunk."""
    names = ["group_id", "messages", "prompt_text", "columns"]
    if prompts.manifest.kind_schema == "prompts/2":
        names.append(pictures.OFFERED)
    return pictures.without_empty(prompts.table(names)).combine_chunks()
