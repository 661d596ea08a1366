"""The number of turns until success, for rollouts that are episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.rollouts import OF_EPISODES
from quiver.stages.common.store import Version


def steps_to_success(rollouts: Version, scores: pa.Array, threshold: float) -> dict[str, Any]:
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
    steps = turns[scores >= threshold]
    num_scored = int((~np.isnan(scores)).sum())
    within = {
        str(most): float((steps <= most).sum() / num_scored) for most in sorted(set(steps.tolist()))
    }
    return {
        "steps_to_success": {
            "mean": float(steps.mean()) if len(steps) else None,
            "median": float(np.median(steps)) if len(steps) else None,
            "n": len(steps),
            "within": within,
        }
    }
