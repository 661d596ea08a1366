"""What the gap between the engine's logprobs and the proximal ones does to a token's loss: a
bounded weight, and the rejection of what lies too far off. Pure functions.

The weight itself is `losses.correction`. What is rejected has no loss, and counts in the
denominators all the same.

    costs = costs * weight(prox_logprobs, old_logprobs, offsets, config.correction)
"""

from __future__ import annotations

import torch
from torch import Tensor

from quiver.stages.common.ragged import Ragged

from . import losses
from .config import Correction


def weight(
    prox_logprobs: Tensor, old_logprobs: Tensor, offsets: Tensor, correction: Correction
) -> Tensor:
    """What multiplies each token's loss: w of `losses.correction`, or 1 (mode `none`), and 0 where
    the token is rejected.

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
    """Whether low ≤ D ≤ high, with d = prox − old of a token: D = exp(d) for `ratio`, d²/2 for
    `k2`, e^d − d − 1 for `k3`, by `level` of the `token`, or the `sum`, `mean` or `max` over its
    rollout's tokens.

    For `ratio` sum and mean are of d, so they are the product of the ratios and their geometric
    mean. The divergences are never below 0, however the gaps of a completion cancel out: they
    reject where the mean of d is near 0 and single tokens are far off. Equal policies are kept
    everywhere, unless `low` says otherwise.

    verl's `rollout_rs`: its k1 is −d, so its bounds are the inverse of those of `ratio` here; it
    has no maximum of k1, and clamps d of each token to ±20, here the logarithm of D is.

    Args:
        prox_logprobs, old_logprobs: [N].
        offsets: [B+1] int64.
        measure, level: as above.
        low, high: of D; of a ratio, or in nats.
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
