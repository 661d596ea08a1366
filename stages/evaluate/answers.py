"""What the answers of an evaluation count: scores of those that were cut off, and turns to success.

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
from quiver.stages.core.store import Version
from quiver.stages.turns.statistics import were_cut

from .config import Config


def fill_cut_scores(
    config: Config, table: pa.Table, inputs: Mapping[str, Version]
) -> tuple[pa.Table, dict[str, Any]]:
    """Fill in the null scores of answers that were cut off, by the rule `config.unscored`.

    The worst score is the lowest of this evaluation and of its baseline, at most 0, and below the
    threshold. So a cut answer is never correct, and never counts as more here than in the baseline.

    Returns the evaluations/1 table and, for the metrics, the number of scores that stay null
    (`null`), of cut answers (`limited`) and, if there are any, their score (`limited_score`).
    """
    scores = table["score"]
    metrics: dict[str, Any] = {"null": scores.null_count, "limited": 0}
    if config.unscored == "leave_out":
        return table, metrics
    rollouts = inputs["rollouts"]
    is_cut = were_cut(rollouts)
    rewards = inputs["rewards"].table()
    errors = rewards["errors"].combine_chunks()
    # [rewards] bool: a scorer that decides the score raised an error.
    failed = np.zeros(len(rewards), bool)
    for name in (field.name for field in errors.type):
        if config.score in ("reward", name):
            failed |= pc.struct_field(errors, name).is_valid().to_numpy(zero_copy_only=False)
    order = pc.index_in(table["rollout_id"], value_set=rewards["rollout_id"].combine_chunks())
    has_failed = pa.array(failed).take(order.combine_chunks())
    is_counted = pc.and_(scores.is_null(), pc.and_not(is_cut, has_failed))
    num_counted = pc.sum(is_counted).as_py()
    if not num_counted:
        return table, metrics
    number = 0.0
    if config.unscored == "worst":
        measured = [scores]
        if "baseline" in inputs:
            measured.append(inputs["baseline"].table(["score"])["score"])
        lowest = [pc.min(column).as_py() for column in measured]
        below = np.nextafter(np.float32(config.threshold), np.float32(-np.inf))
        number = min([number, float(below), *(score for score in lowest if score is not None)])
    counted = pc.if_else(is_counted, pa.scalar(number, scores.type), scores)
    place = table.schema.get_field_index("score")
    table = table.set_column(place, table.schema.field(place), counted)
    return table, {"null": counted.null_count, "limited": num_counted, "limited_score": number}


def turns_to_success(rollouts: Version, scores: pa.Array, threshold: float) -> dict[str, Any]:
    """Return statistics of the turns of successful episodes, whose score is at least `threshold`:
    their mean and median, and `within`, the share of all scored episodes that succeeded in at most
    so many turns. Empty for rollouts without episodes.

    Args:
        scores: [rows], null if an episode was not scored.
    """
    if rollouts.manifest.kind_schema not in OF_EPISODES:
        return {}
    turns = pc.list_value_length(rollouts.table(["turns"])["turns"]).to_numpy()
    scores = np.array(scores.to_pylist(), np.float64)  # null: NaN
    turns_taken = turns[scores >= threshold]
    num_scored = int((~np.isnan(scores)).sum())
    limits = sorted(set(turns_taken.tolist()))
    within = {str(most): float((turns_taken <= most).sum() / num_scored) for most in limits}
    return {
        "turns_to_success": {
            "mean": float(turns_taken.mean()) if len(turns_taken) else None,
            "median": float(np.median(turns_taken)) if len(turns_taken) else None,
            "n": len(turns_taken),
            "within": within,
        }
    }
