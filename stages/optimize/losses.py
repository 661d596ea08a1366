"""Per-token losses, their weights, KL estimators, off-policy weights. Pure functions of flat tensors.

Legend: B rollouts, N completion tokens, one after another as an Arrow list column stores them; rollout i owns tokens
`offsets[i]:offsets[i+1]`. `logprobs` [N] carries the gradient; everything else is data. The surrogate (what a token costs) and
the aggregation (what a token weighs in the step) are apart: loss = Σ_t weight_t · surrogate_t. The weights are made once for
the whole optimizer step, so micro-batches, their order and ranks change nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from stages.common.ragged import Ragged

MAX_LOG_RATIO = 20.0


class Tokens(NamedTuple):
    """What a surrogate sees of the completion tokens of some whole rollouts."""

    logprobs: torch.Tensor
    """[N] log π_θ, with gradient."""
    anchor: torch.Tensor
    """[N] the ratio's denominator: `prox_logprobs` where given, else `old_logprobs`."""
    advantages: torch.Tensor
    """[N] of the token, or of its rollout repeated."""
    offsets: torch.Tensor
    """[B+1] int64."""


def log_ratio(logprobs: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
    """[N] logprobs − anchor, clamped to ±20 so that `exp` stays finite (the gradient is 0 beyond)."""
    return (logprobs - anchor).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# -- surrogates: Tokens -> (loss [N], clipped [N] bool) ------------------------------------------------------------------------


def clipped(
    tokens: Tokens,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    delta: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """loss_t = −min(r A, clip(r, 1−clip_low, 1+clip_high) A) with r = exp(logprobs − anchor).

    Clipping stops the step where it would move a token further in the direction that its advantage already pushed it. At r = 1
    its gradient is REINFORCE's, −A ∇logprobs; with both bounds infinite it is plain importance sampling. `dual_clip` c bounds
    the loss where A < 0: min(loss, −c A). `delta` caps r in the unclipped branch only.

    Args:
        tokens: of whole rollouts.
        clip_low, clip_high: distances from ratio 1, each ≥ 0.
        dual_clip: > 1, or None for off.
        delta: > 1 + clip_high, or None for off.
    Returns:
        loss [N]; and bool [N], true where a bound was the value taken (that token has no gradient).

    Reference: PPO, https://arxiv.org/abs/1707.06347, equation 7; separate bounds: DAPO, https://arxiv.org/abs/2503.14476; dual
    clip: https://arxiv.org/abs/1912.09729; delta: https://arxiv.org/abs/2505.07291 (two-sided clipping).
    """
    ratio, advantages = log_ratio(tokens.logprobs, tokens.anchor).exp(), tokens.advantages
    free = (ratio if delta is None else ratio.clamp(max=delta)) * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    loss, taken = -torch.minimum(free, bounded), bounded < free
    if delta is not None:
        taken = taken | ((ratio > delta) & (advantages != 0))
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, taken = torch.where(over, ceiling, loss), taken | over
    return loss, taken


# -- aggregations: what a token of the optimizer step weighs -------------------------------------------------------------------


def token_mean(lengths: torch.Tensor, max_completion_tokens: int | None = None) -> torch.Tensor:
    """1 / N for each of the step's N tokens: every token counts alike, so long completions count more. [N]

    Reference: DAPO, https://arxiv.org/abs/2503.14476 (token-level loss).
    """
    tokens = int(lengths.sum())
    return torch.full((tokens,), 1.0 / max(tokens, 1), dtype=torch.float64)


def sequence_mean(lengths: torch.Tensor, max_completion_tokens: int | None = None) -> torch.Tensor:
    """1 / (B T_i): mean over the step's rollouts of the mean over each one's own tokens. [N]

    Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, equation 3.
    """
    return (1.0 / (len(lengths) * lengths.double())).repeat_interleave(lengths)


def constant(lengths: torch.Tensor, max_completion_tokens: int | None = None) -> torch.Tensor:
    """1 / (B max_completion_tokens): a token weighs the same in every step, however long the completions came out. [N]

    Reference: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    if not max_completion_tokens:
        raise ValueError("aggregation 'constant' needs max_completion_tokens >= 1")
    return torch.full((int(lengths.sum()),), 1.0 / (len(lengths) * max_completion_tokens), dtype=torch.float64)


# -- KL to the reference -------------------------------------------------------------------------------------------------------


def kl(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str = "k3", unbiased_gradient: bool = True
) -> torch.Tensor:
    """Estimate of KL(π_θ ‖ π_ref) a token, with d = ref − logprobs: k1 = −d, k2 = d²/2, k3 = e^d − d − 1.

    All three estimate the value; as a loss they differ: under samples of π_θ, the gradient of k1 is 0 in the mean and that of
    k3 is not the KL's, while that of k2 is. `unbiased_gradient` therefore keeps the estimator's value and takes k2's gradient,
    −d ∇logprobs.

    Args:
        logprobs: [N] with gradient.
        ref_logprobs: [N] under the reference, at the same temperature.
        estimator: k1, k2 or k3.
        unbiased_gradient: take the gradient from k2 whatever the value is.
    Returns:
        [N]; k2 and k3 are ≥ 0.

    Reference: http://joschu.net/blog/kl-approx.html; gradients: https://arxiv.org/abs/2510.01555.
    """
    d = -log_ratio(logprobs, ref_logprobs)
    k2 = d**2 / 2
    value = {"k1": lambda: -d, "k2": lambda: k2, "k3": lambda: torch.expm1(d) - d}[estimator]()
    return value.detach() + (k2 - k2.detach()) if unbiased_gradient else value


# -- off-policy correction -----------------------------------------------------------------------------------------------------


def correction(
    prox_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    offsets: torch.Tensor,
    *,
    mode: str = "truncate",
    level: str = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> torch.Tensor:
    """w = exp(prox − old), bounded: what multiplies a token's loss when the ratio is taken against `prox_logprobs`.

    `level`: `token` as it stands; `sequence` the product over the rollout's tokens; `geometric` their geometric mean. `mode`:
    `truncate` sets w to min(w, high); `mask` sets it to 0 outside [low, high] and leaves it inside. Equal policies give 1
    everywhere.

    Args:
        prox_logprobs, old_logprobs: [N] of the same weights under the trainer's and the engine's numerics.
        offsets: [B+1] int64.
        mode, level, low, high: as above.
    Returns:
        [N], no gradient.

    Reference: decoupled PPO, https://arxiv.org/abs/2110.00641; truncation: https://arxiv.org/abs/1802.01561,
    section 4.1.
    """
    rows = Ragged(log_ratio(prox_logprobs, old_logprobs).detach(), offsets)
    if level != "token":
        each = rows.segment_sum() if level == "sequence" else rows.segment_mean()
        rows = rows.with_values(each.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[rows.segment_ids])
    weight = rows.values.exp()
    if mode == "truncate":
        return weight.clamp(max=high)
    return torch.where((weight >= low) & (weight <= high), weight, 0.0)
