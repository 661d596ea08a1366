"""Whole groups, for functions of scope `group`: a shard may hold some rows of a group alone, and a
retry asks for those that have no reward.

    groups = Groups(rollouts, prompts)
    whole = groups.of(["r-4", "r-9"])       # whole.batch holds every row of their groups
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """How many rows each group has."""
    rows: list[int]
    """Where in the batch each of those rows is."""


class Groups:
    """The groups of a version of rollouts; within each, rows come by their `sample_index`."""

    def __init__(self, rollouts: Version, prompts: Version) -> None:
        self._rollouts = rollouts.table().combine_chunks()
        self._prompts = prompts_of(prompts)
        self._prompt_rows = tables.join(self._rollouts, self._prompts)

    def of(self, rollout_ids: Sequence[str]) -> Whole:
        """The whole groups of these rollouts, in the order in which they are named first."""
        ids = self._rollouts["rollout_id"].combine_chunks()
        groups = self._rollouts["group_id"].combine_chunks()
        asked = pc.index_in(pa.array(rollout_ids, ids.type), value_set=ids)
        named = groups.take(asked).unique()
        order = pc.index_in(groups, value_set=named)
        places = pa.table(
            {"row": range(len(ids)), "group": order, "sample": self._rollouts["sample_index"]}
        )
        keys = [("group", "ascending"), ("sample", "ascending"), ("row", "ascending")]
        places = places.filter(pc.is_valid(order)).sort_by(keys)
        rows = places["row"].combine_chunks()
        prompts = self._prompts.take(self._prompt_rows.take(rows))
        batch = tables.offered(self._rollouts.take(rows), prompts)
        sizes = pc.value_counts(places["group"]).field("counts").to_pylist()
        return Whole(batch, sizes, pc.index_in(asked.cast(rows.type), value_set=rows).to_pylist())


def prompts_of(prompts: Version) -> pa.Table:
    """What scorers are offered of prompts, in one chunk."""
    names = ["group_id", "messages", "prompt_text", "columns"]
    if prompts.manifest.kind_schema == "prompts/2":
        names.append(pictures.OFFERED)
    return pictures.without_empty(prompts.table(names)).combine_chunks()
