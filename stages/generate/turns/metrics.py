"""What a version of episodes was like, for its manifest."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def turn_metrics(rollouts: pa.Table) -> dict[str, Any]:
    """Of rollouts/2: why episodes ended, how many turns they had, what stood between these."""
    counts = pc.list_value_length(rollouts["turns"])
    turns = pa.Table.from_struct_array(pc.list_flatten(rollouts["turns"]))
    num_episodes = max(len(rollouts), 1)
    observed = pc.sum(pc.list_value_length(turns["observation_ids"])).as_py() or 0
    return {
        "end_reasons": dict(sorted(Counter(rollouts["end_reason"].to_pylist()).items())),
        "mean_turns": round(len(turns) / num_episodes, 3),
        "max_turns": pc.max(counts).as_py() or 0,
        "mean_observation_tokens": round(observed / num_episodes, 3),
        "parse_errors": len(turns) - turns["parse_error"].null_count,
        "restarts": len(turns) - turns["restart_ids"].null_count,
        "environment_seconds": round(pc.sum(turns["seconds"]).as_py() or 0.0, 3),
    }
