"""Off-policy weights of tokens: a bounded weight for the gap between the engine's and the proximal
logprobs, and the rejection of tokens too far off. Pure functions.

The weight itself is `losses.correction`. A rejected token has no loss, but counts in the
denominators.

    token_losses = token_losses * weight(prox_logprobs, old_logprobs, offsets, config.correction)
"""

from __future__ import annotations

import torch
from torch import Tensor

from quiver.stages.model.ragged import Ragged

from . import losses
from .config import Correction


def weight(
    prox_logprobs: Tensor, old_logprobs: Tensor, offsets: Tensor, correction: Correction
) -> Tensor:
    """Return the factor of each token's loss: w of `losses.correction`, or 1 (mode `none`), and 0
    if the token is rejected.

    Args:
        prox_logprobs, old_logprobs: [N].
        offsets: [B+1] int64.
    Returns:
        [N], no gradient.
    """
    weights = torch.ones_like(prox_logprobs)
    if correction.mode != "none":
        bounds = correction.model_dump(include={"mode", "level", "low", "high"})
        weights = losses.correction(prox_logprobs, old_logprobs, offsets, **bounds)
    if correction.reject is None:
        return weights
    is_kept = kept(
        prox_logprobs,
        old_logprobs,
        offsets,
        measure=correction.reject,
        level=correction.reject_level,
        low=correction.reject_low,
        high=correction.reject_high,
    )
    return weights.where(is_kept, 0.0)


def kept(
    prox_logprobs: Tensor,
    old_logprobs: Tensor,
    offsets: Tensor,
    *,
    measure: str,
    level: str,
    low: float = 0.0,
    high: float,
) -> Tensor:
    """Return true where low ≤ D ≤ high, with d = prox − old of a token: D = exp(d) for `ratio`,
    d²/2 for `k2`, e^d − d − 1 for `k3`. `level` takes D of the `token`, or its `sum`, `mean` or
    `max` over the rollout's tokens.

    For `ratio`, sum and mean are taken of d, so they give the product of the ratios and their
    geometric mean. The divergences are never below 0, so gaps of opposite sign do not cancel: they
    reject a completion with single tokens far off even if the mean of d is near 0. Equal policies
    are kept everywhere, unless `low` says otherwise.

    In verl's `rollout_rs`, k1 is −d, so its bounds are the inverse of the `ratio` bounds here. verl
    has no maximum of k1. It clamps d of each token to ±20; here the logarithm of a `ratio`'s D is
    clamped.

    Args:
        prox_logprobs, old_logprobs: [N].
        offsets: [B+1] int64.
        measure, level: as above.
        low, high: bounds of D; a ratio, or nats.
    Returns:
        [N] bool.

    Reference: verl's rollout correction; k2 and k3: http://joschu.net/blog/kl-approx.html.
    """
    gaps = (prox_logprobs - old_logprobs).detach()
    if measure != "ratio":
        gaps = gaps.clamp(-losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO)
    distances = {"ratio": gaps, "k2": gaps.square() / 2, "k3": torch.expm1(gaps) - gaps}[measure]
    if level != "token":
        of_tokens = Ragged(distances, offsets)
        if level == "max":
            of_rollouts = torch.segment_reduce(
                distances, "max", offsets=offsets, initial=-torch.inf
            )
        else:
            of_rollouts = {"sum": of_tokens.segment_sum, "mean": of_tokens.segment_mean}[level]()
        distances = of_rollouts[of_tokens.segment_ids]
    if measure == "ratio":
        distances = distances.clamp(-losses.MAX_LOG_RATIO, losses.MAX_LOG_RATIO).exp()
    return (distances >= low) & (distances <= high)
