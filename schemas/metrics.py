"""The metrics in a manifest that other code relies on, by kind. All other metrics are free.

    problem("evaluations", {"score": "high"})     # "score: Input should be a valid number"

Not of the spine: a stage writes its metrics freely, and this check runs when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import printable

Number = float | None


class _Metrics(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Estimate(_Metrics):
    """A mean over prompts. `stderr` and `interval` are None if there is only one prompt."""

    score: float
    stderr: Number
    n: int
    interval: list[float] | None = Field(None, min_length=2, max_length=2)


class _Difference(_Metrics):
    """The difference to a baseline."""

    score: _Estimate
    pass_at_k: dict[str, _Estimate] = Field({}, alias="pass@k")


class _Evaluations(_Estimate):
    """Metrics of an evaluation.

    `null` counts answers that are left out. `limited` counts answers that a limit cut off before
    they were scored; each counts as `limited_score`.
    """

    null: int = 0
    limited: int = 0
    limited_score: Number = None
    pass_at_k: dict[str, _Estimate] = Field({}, alias="pass@k")
    difference: _Difference | None = None


class _Prompts(_Metrics):
    assistant_starts: dict[str, str | None] = {}


class _Rollouts(_Metrics):
    mean_completion_tokens: Number = None


class _Function(_Metrics):
    mean: Number = None


class _Groups(_Metrics):
    count: int = 0
    too_small: int = 0
    zero_variance: Number = None


class _Rewards(_Metrics):
    reward_mean: Number = None
    reward_null: int | None = None
    functions: dict[str, _Function] = {}
    groups: _Groups = _Groups()


class _Audit(_Metrics):
    mean_gap: Number = None


class _Policy(_Metrics):
    step: int = Field(0, ge=0)
    skipped_steps: int = 0
    updates: str | None = None
    advantages: str | None = None
    audit: _Audit = _Audit()
    first_clip_fraction: Number = None


_BY_KIND: dict[str, type[_Metrics]] = {
    "prompts": _Prompts,
    "rollouts": _Rollouts,
    "rewards": _Rewards,
    "policy": _Policy,
    "evaluations": _Evaluations,
}


def score_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the score of an evaluation, and its counts of answers scored and left out."""
    names = ("score", "stderr", "n", "null", "limited", "limited_score")
    return {name: metrics[name] for name in names if name in metrics}


def groups_with_contrast(groups: dict[str, Any]) -> int:
    """Count the groups of a rewards version whose rewards differ, from its metrics `groups`.

    Such a group has at least two scored rollouts, whose rewards are not all equal.
    """
    num_scored = groups["count"] - groups.get("too_small", 0)
    return num_scored - round(num_scored * (groups.get("zero_variance") or 0.0))


def problem(kind: str, metrics: dict[str, Any]) -> str:
    """Return the problem with the metrics of a version of this kind, or an empty string."""
    if kind in _BY_KIND:
        try:
            _BY_KIND[kind].model_validate(metrics)
        except ValidationError as error:
            first = error.errors()[0]
            return printable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    return ""
