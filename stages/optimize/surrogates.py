"""More surrogates, in the form of losses.py, and an aggregation by prompt: pure functions.

    token_losses, at_bound = geometric_clipped(tokens, clip_low=0.4, clip_high=0.4)

Not of the spine: losses.py shows what a surrogate is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quiver.stages.model.ragged import Ragged

from .losses import MAX_LOG_RATIO, Tokens, log_ratio


def divergence_masked(
    tokens: Tokens,
    *,
    divergence: str,
    divergence_low: float,
    divergence_high: float,
    ratio_max: float | None = None,
    drift_coef: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """loss_t = −M r A + drift_coef (log r)²; M = 0 where A > 0, r > 1 and D > divergence_high, or A
    < 0, r < 1 and D > divergence_low; else 1. D is the `binary_divergence`.

    A token is left out if its probability has moved too far in the direction of its advantage; a
    rare token may change its ratio a lot. At r = 1 its gradient is REINFORCE's; with both bounds
    infinite it is plain importance sampling.

    `ratio_max` caps r as a weight and keeps the gradient, −M min(r, ratio_max) A ∇logprobs; the
    paper finds that it harms. verl caps at 20 (`clip_ratio_c`), and its loss value is in terms of
    logprobs. `drift_coef` is prime-rl's, whose default is `tv` with bounds of 0.2 and a
    `drift_coef` of 1e-3.

    Args:
        tokens: of whole rollouts.
        divergence: tv or kl.
        divergence_low, divergence_high: ≥ 0; a difference of probabilities for `tv`, nats for `kl`.
        ratio_max: > 0, or None for off.
        drift_coef: ≥ 0.
    Returns:
        token losses [N]; and bool [N], true where M = 0 (that token has the drift term's
        gradient alone).

    Reference: DPPO, https://arxiv.org/abs/2602.04879; drift: https://arxiv.org/abs/2602.02276.
    """
    advantages = tokens.advantages
    log_ratios = log_ratio(tokens.logprobs, tokens.anchor)
    distance = binary_divergence(tokens.logprobs.detach(), tokens.anchor, divergence)
    too_high = (advantages > 0) & (log_ratios > 0) & (distance > divergence_high)
    too_low = (advantages < 0) & (log_ratios < 0) & (distance > divergence_low)
    masked = too_high | too_low
    weight = log_ratios.detach().exp().clamp(max=math.inf if ratio_max is None else ratio_max)
    ratio = weight * (1 + log_ratios - log_ratios.detach())  # its gradient is weight ∇logprobs
    token_losses = drift_coef * log_ratios.square() - torch.where(masked, 0.0, ratio * advantages)
    return token_losses, masked


def binary_divergence(logprobs: Tensor, anchor: Tensor, divergence: str) -> Tensor:
    """Distance between two distributions over two outcomes, "the sampled token" and "any other": π
    = exp(logprobs) and μ = exp(anchor) are the probabilities of the first. It is their total
    variation |π − μ| (tv), or KL(μ ‖ π) = μ log(μ/π) + (1−μ) log((1−μ)/(1−π)) (kl).

    It never exceeds the same distance over the whole vocabulary, since all other tokens count as
    one outcome: a token may pass although the full distributions are further apart.

    Args:
        logprobs: [N] ≤ 0, under the policy, without gradient.
        anchor: [N] ≤ 0 and finite.
        divergence: tv or kl.
    Returns:
        [N]; tv within [0, 1]; kl ≥ 0 up to rounding. kl is infinite if π = 0. If π rounds to 1 and
        μ does not, log(1−π) is the log of the dtype's smallest normal number, so kl is finite (at
        most 88 in float32).

    Reference: DPPO, https://arxiv.org/abs/2602.04879 (the binary approximation).
    """
    now = logprobs.exp()
    before = anchor.exp()
    if divergence == "tv":
        return (now - before).abs()
    smallest = torch.finfo(now.dtype).tiny  # so that 0 log(0 / 0) is 0
    others_now = -torch.expm1(logprobs).clamp(max=-smallest)
    others_before = -torch.expm1(anchor).clamp(max=-smallest)
    kl_of_others = others_before * (others_before.log() - others_now.log())
    return before * (anchor - logprobs) + kl_of_others


def geometric_clipped(
    tokens: Tokens, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """loss_t = −A exp(mean over rollout i's tokens of c), with c = min(log r, clip_high) where A >
    0, max(log r, −clip_low) where A < 0.

    It uses the geometric mean of the tokens' ratios in place of the arithmetic mean, so that one
    token with an extreme ratio changes little. Each token is clipped before the mean, while
    `sequence_clipped` clips the mean: the other tokens of the completion keep their gradient. The
    bounds apply to log r, so 0.4 lets ratios between e^−0.4 and e^0.4 through. With infinite bounds
    it is `sequence_clipped` with infinite bounds.

    TRL and verl do the same. The paper has one distance; with two, its formula would bound a token
    of negative advantage by clip_high. With advantages per token, each token is clipped by the sign
    of its own advantage.

    Args:
        tokens: of whole rollouts.
        clip_low, clip_high: bounds of log r, as distances from 0, each ≥ 0.
    Returns:
        token losses [N]; and bool [N], true where a token's ratio was clipped (it has no gradient).

    Reference: GMPO, https://arxiv.org/abs/2507.20673.
    """
    advantages = tokens.advantages
    log_ratios = tokens.logprobs - tokens.anchor
    bounded = torch.where(
        advantages > 0, log_ratios.clamp(max=clip_high), log_ratios.clamp(min=-clip_low)
    )
    of_rollout = Ragged(bounded, tokens.offsets)
    log_mean = of_rollout.segment_mean().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_losses = -advantages * log_mean[of_rollout.segment_ids].exp()
    return token_losses, (bounded != log_ratios) & (advantages != 0)


# -- aggregations: the weight of a token in the optimizer step


def prompt_mean(
    lengths: Tensor, max_completion_tokens: int | None = None, *, groups: Tensor
) -> Tensor:
    """1 / (P L_g) for each token of a group with L_g tokens: mean over the step's P prompts of the
    mean over all tokens of a prompt's completions.

    A prompt with long completions counts no more than another, as with `sequence_mean`; within its
    group long completions count more, as with `token_mean`. With one rollout a prompt it is
    `sequence_mean`, with one prompt `token_mean`.

    Args:
        lengths: [B] int64, tokens of each of the step's completions.
        max_completion_tokens: not used.
        groups: [B] int64; rollouts of one prompt have one number.
    Returns:
        [N] float64.

    Reference: ScaleRL, https://arxiv.org/abs/2510.13786 (prompt average).
    """
    numbers, positions = groups.unique(return_inverse=True)
    tokens_of_group = torch.zeros(len(numbers), dtype=torch.int64).index_add(0, positions, lengths)
    weights = 1.0 / (len(numbers) * tokens_of_group[positions].double())
    return weights.repeat_interleave(lengths)
