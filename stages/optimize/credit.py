"""Rewards of turns from a version of rewards, checked against the rollouts' turns.

turn_rewards(Sampled({"rollouts": …, "rewards": …}))        # [B] list<float32>
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rollouts
from quiver.schemas.errors import SchemaError, printable

from .checks import Sampled


def with_turns(table: pa.Table) -> pa.Table:
    """Return `table` of rollouts with a column `turns`. If it had none, the column is null, which
    means one turn."""
    if "turns" in table.column_names:
        return table
    kind = rollouts.OF_TURNS.field("turns").type
    return table.append_column("turns", pa.nulls(len(table), kind))


def turn_rewards(version: Sampled) -> pa.ListArray:
    """Return [B] list<float32>: the reward of each turn of each rollout, 0 for a turn without one;
    NaN for every turn of a rollout that is not scored, or that the engine gave up. Raises
    SchemaError unless each scored rollout has one reward for each turn."""
    table = with_turns(version.table)
    counts = np.array(pc.list_value_length(table["turns"]).fill_null(1), dtype=np.int64)
    column = version.column("rewards", "turn_rewards")
    is_scored = pc.and_(
        version.column("rewards", "reward").is_valid(),
        pc.not_equal(table["finish_reason"], "abort"),
    )
    lengths = np.array(pc.list_value_length(column).fill_null(0), dtype=np.int64)
    differs = np.flatnonzero(np.array(is_scored) & (lengths != counts))
    if len(differs):
        row = int(differs[0])
        raise SchemaError(
            str(version.inputs["rewards"].ref),
            f"{len(differs)} scored rollouts have not one turn reward a turn, such as "
            f"{printable(table['rollout_id'][row].as_py())}: it has {counts[row]} turns, found "
            f"{lengths[row]} turn_rewards",
            next=f"score {version.rollouts.ref} again",
        )
    values = np.full(counts.sum(), np.nan, np.float32)
    earned = pc.list_flatten(column.filter(is_scored)).fill_null(0.0)
    values[np.repeat(np.array(is_scored), counts)] = np.array(earned)
    offsets = np.append(0, counts.cumsum()).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
