"""Scores of answers that a limit cut off before they could be scored.

A cut episode often gets no reward: its score is null, although no scorer failed. If such rows were
left out, a policy would look better the more often it is cut. So they count by the rule
`evaluate.unscored`. A failed scorer or environment says nothing about the policy; those rows stay
null and are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.rollouts import OF_EPISODES
from quiver.stages.common.episodes import LIMITS
from quiver.stages.common.store import Version

from .config import Config


def count_unscored(
    config: Config, table: pa.Table, inputs: Mapping[str, Version]
) -> tuple[pa.Table, dict[str, Any]]:
    """Fill in the null scores of answers that were cut off, by the rule `config.unscored`.

    The worst score is the lowest of this evaluation and of its baseline, and at most 0. So a cut
    answer never counts as more here than in the baseline.

    Returns the evaluations/1 table and, for the metrics, the number of scores that stay null
    (`null`), of cut answers (`limited`) and, if there are any, their score (`limited_score`).
    """
    scores = table["score"]
    if config.unscored == "leave_out":
        return table, {"null": scores.null_count, "limited": 0}
    rollouts = inputs["rollouts"]
    is_episode = rollouts.manifest.kind_schema in OF_EPISODES
    column = "end_reason" if is_episode else "finish_reason"
    limits = pa.array(LIMITS if is_episode else ["length"])
    is_cut = pc.is_in(rollouts.table([column])[column], value_set=limits)
    has_failed = _failed(inputs["rewards"].table(), table["rollout_id"], config.score)
    is_counted = pc.and_(scores.is_null(), pc.and_not(is_cut, has_failed))
    num_counted = pc.sum(is_counted).as_py() or 0
    num_left_out = scores.null_count - num_counted
    if not num_counted:
        return table, {"null": num_left_out, "limited": 0}
    number = 0.0
    if config.unscored == "worst":
        measured = [scores]
        if "baseline" in inputs:
            measured.append(inputs["baseline"].table(["score"])["score"])
        lowest = [pc.min(each).as_py() for each in measured]
        number = min([number, *(score for score in lowest if score is not None)])
    counted = pc.if_else(is_counted, pa.scalar(number, scores.type), scores)
    place = table.schema.get_field_index("score")
    table = table.set_column(place, table.schema.field(place), counted)
    return table, {"null": num_left_out, "limited": num_counted, "limited_score": number}


def _failed(rewards: pa.Table, rollout_ids: pa.ChunkedArray, score: str) -> pa.Array:
    """Return [rows] bool, in the order of `rollout_ids`: a scorer that decides `score` raised an
    error."""
    errors = rewards["errors"].combine_chunks()
    has_failed = np.zeros(len(rewards), bool)
    for name in (field.name for field in errors.type):
        if score in ("reward", name):
            has_failed |= pc.struct_field(errors, name).is_valid().to_numpy(zero_copy_only=False)
    order = pc.index_in(rollout_ids, value_set=rewards["rollout_id"].combine_chunks())
    return pa.array(has_failed).take(order.combine_chunks())
