"""What Prefect's pages show of a finished stage: the statistics of its rewards, function by function.

Numbers come from the version's manifest, which stays the record; an artifact is a view of it and may be lost with the server.
"""

from __future__ import annotations

import re
from typing import Any

from prefect.artifacts import create_table_artifact

from stages.common.process import Call, Outcome

_COLUMNS = ("mean", "std", "min", "max", "null", "null_rate", "errors", "seconds")


def publish(call: Call, outcome: Outcome) -> None:
    """Leave what there is to see of `outcome` with the task that runs now; nothing for a version that was there already."""
    if outcome.cached or call.stage != "reward":
        return
    description = f"Rewards {outcome.ref}, {outcome.rows} rollouts{_correlations(outcome.metrics)}"
    create_table_artifact(table=reward_rows(outcome.metrics), key=_key("rewards", call.into), description=description)


def reward_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a function, and a last one for the reward that they make together; None where too few rows have a value."""
    each = [
        {"function": name, **{column: found.get(column) for column in _COLUMNS}} for name, found in metrics["functions"].items()
    ]
    return [*each, {"function": "reward", **{column: metrics.get(f"reward_{column}") for column in _COLUMNS}}]


def _correlations(metrics: dict[str, Any]) -> str:
    found = [f"{pair} {value:.2f}" for pair, value in (metrics.get("correlation") or {}).items() if value is not None]
    return "; correlation: " + ", ".join(found) if found else ""


def _key(kind: str, run: str | None) -> str:
    """Prefect's keys are lower-case letters, digits and dashes; the run's name is that but for dots and underscores."""
    return f"{kind}-{re.sub('[^a-z0-9-]', '-', run or 'run')}"
