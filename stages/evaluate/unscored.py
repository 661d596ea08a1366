"""What an answer counts as that a limit cut off before anything could score it.

An episode that is cut is often never paid: its score is null, and no scorer failed. If such rows
were left out, a policy would look better the more often it is cut. So they count by the rule
`evaluate.unscored`. A scorer that failed, or an environment, says nothing about the policy; those
rows stay null and are left out.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.rollouts import OF_EPISODES
from quiver.stages.common.episodes import LIMITS
from quiver.stages.common.store import Version

from .config import Config


def ended_by_a_limit(rollouts: Version) -> pa.ChunkedArray:
    """[rows] bool: a limit of tokens, turns or context cut the answer off."""
    if rollouts.manifest.kind_schema in OF_EPISODES:
        reasons = rollouts.table(["end_reason"])["end_reason"]
        return pc.is_in(reasons, value_set=pa.array(LIMITS))
    return pc.equal(rollouts.table(["finish_reason"])["finish_reason"], "length")


def failed(rewards: pa.Table, score: str) -> pa.ChunkedArray:
    """[rows] bool, in the rewards' order: a scorer that decides `score` raised an error."""
    errors = rewards["errors"].combine_chunks()
    names = [field.name for field in errors.type]
    deciding = names if score == "reward" else [name for name in names if name == score]
    has_failed = pa.array([False] * len(rewards), pa.bool_())
    for name in deciding:
        has_failed = pc.or_(has_failed, pc.struct_field(errors, name).is_valid())
    return pa.chunked_array([has_failed])


def count(
    config: Config, scores: pa.ChunkedArray, is_cut: pa.ChunkedArray, baseline: Version | None
) -> tuple[pa.ChunkedArray, dict[str, Any]]:
    """`scores` with a number for the null ones that are cut, as `config.unscored` says; and how
    many these are, and what they count as, for the manifest's metrics.

    The worst score is the lowest of this evaluation and of its `baseline`, and at most 0. So a cut
    answer never counts as more here than in the baseline.
    """
    is_counted = pc.and_(scores.is_null(), is_cut)
    num_counted = pc.sum(is_counted).as_py() or 0
    if config.unscored == "leave_out" or not num_counted:
        return scores, {"limited": 0}
    number = 0.0
    if config.unscored == "worst":
        lowest = [pc.min(scores)]
        if baseline is not None:
            lowest.append(pc.min(baseline.table(["score"])["score"]))
        number = min([number, *(low.as_py() for low in lowest if low.is_valid)])
    counted = pc.if_else(is_counted, pa.scalar(number, scores.type), scores)
    return counted, {"limited": num_counted, "limited_score": number}
