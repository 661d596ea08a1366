"""The numeric audit: does the trainer give the saved tokens the probability that the engine gave?

Wrong weights, a wrong template, another temperature, raw instead of processed logprobs: each gives
finite losses and a policy that gets worse. Each also moves the mean gap between the trainer's and
the engine's logprobs far beyond what their numerics can differ. So they are compared before the
first update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quiver.schemas.errors import NumericError
from quiver.stages.common.ragged import Ragged

from .losses import log_ratio


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
