"""The numeric audit: does the trainer give the saved tokens the probability that the engine gave?

Wrong weights, a wrong template, another temperature, raw instead of processed logprobs: each gives
finite losses and a policy that gets worse. Each also moves the mean gap between the trainer's and
the engine's logprobs far beyond what their numerics can differ. So they are compared before the
first update.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quiver.schemas.errors import NumericError
from quiver.stages.common.ragged import Ragged

from .batch import Batch
from .losses import log_ratio
from .objective import Objective

log = logging.getLogger(__name__)


def audit(
    objective: Objective, batch: Batch, logprobs: Tensor, rows: Sequence[int]
) -> dict[str, Any]:
    """Measure rollouts `rows`, on which the policy has the `logprobs` [N]. Those of the starting
    checkpoint must be within the limit: NumericError. With stale ones beside them these are
    measured apart, under `stale`."""
    completions = batch.sequences.completions
    # surrogates without these bounds are measured by PPO's
    bounds = [objective.options.get(name, 0.2) for name in ("clip_low", "clip_high")]

    def measure_rows(rows: list[int]) -> dict[str, Any]:
        old = completions.with_values(batch.old_logprobs).take(torch.tensor(rows))
        report = measure(logprobs[batch.positions(rows)], old.values, old.offsets, *bounds)
        log.info(
            "audit: mean gap %(mean_gap).1e, largest %(max_gap).1e, effective sample size "
            "%(effective_sample_size).3f",
            report,
        )
        return report

    is_stale = [False] * len(batch.groups) if batch.stale is None else batch.stale.tolist()
    fresh_rows = [row for row in rows if not is_stale[row]]
    stale_rows = [row for row in rows if is_stale[row]]
    report = measure_rows(fresh_rows or stale_rows)
    if fresh_rows and stale_rows:
        report["stale"] = measure_rows(stale_rows)
    if fresh_rows:
        require(report, objective.config.audit.max_mean_gap, "optimize audit")
    return report


def measure(
    trainer: Tensor, old: Tensor, offsets: Tensor, clip_low: float, clip_high: float
) -> dict[str, float]:
    """How far the trainer's logprobs [N] are from `old` [N], before any weight has changed.

    Returns:
        mean_gap, max_gap: |trainer − old| over all tokens, in nats
        kl_k1, kl_k3: estimates of KL(old ‖ trainer), mean over tokens
        outside_clip: share of tokens whose ratio is outside [1 − clip_low, 1 + clip_high]
        effective_sample_size: (Σ w)² / Σ w² over rollouts, w the ratio of the whole completion; as
            a share of the rollouts
        tokens, rollouts: how many were compared
    """
    gap = (trainer - old).double()
    bounded = log_ratio(trainer, old).double()
    ratio = bounded.exp()
    weight = log_ratio(Ragged(gap, offsets).segment_sum(), torch.zeros(())).exp()
    return {
        "mean_gap": float(gap.abs().mean()),
        "max_gap": float(gap.abs().max()),
        "kl_k1": float(-gap.mean()),
        "kl_k3": float((torch.expm1(bounded) - bounded).mean()),
        "outside_clip": float(((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).double().mean()),
        "effective_sample_size": float(weight.sum() ** 2 / (weight**2).sum() / len(weight)),
        "tokens": len(gap),
        "rollouts": len(weight),
    }


def require(report: dict[str, float], max_mean_gap: float, name: str) -> None:
    """NumericError about `name` unless the mean gap is a number up to `max_mean_gap`."""
    if not report["mean_gap"] <= max_mean_gap:
        raise NumericError(
            name,
            f"the trainer's logprobs differ from the engine's by {report['mean_gap']:.4f} nats a "
            f"token in the mean (at most {report['max_gap']:.3f}), allowed is "
            f"optimize.audit.max_mean_gap = {max_mean_gap}; the engine sampled with other weights, "
            "another temperature, or reported raw logprobs",
            state="no weight was changed, no version was written.",
            next="generate with the very checkpoint that is trained, or raise "
            "optimize.audit.max_mean_gap",
        )
