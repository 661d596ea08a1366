"""Terms and coefficients beside the policy's loss: entropy bonus, KL coefficient, NLL of good
answers, and the scale of a critic's rewards.

    coef = entropy_bonus(config, entropy_coef, last_entropy)   # loss − coef · Σ weight · entropy
    entropy_coef = next_entropy_coef(config, entropy_coef, entropy)            # after every step
    kl_coef = next_kl_coef(config, kl_coef, kl, num_rollouts)
    learns = uncertain(entropies, share=0.2)
    loss = policy_loss − (nll_weights(config, batch, members) * logprobs).sum()
    moments = reward_moments(policy.manifest.metrics.get("reward_moments"), rewards)
    batch = replace(batch, reward_scale=reward_scale(moments))

Not of the spine: numbers in, numbers out.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .batch import Batch
from .config import Config

MOST_ERROR = 0.2
"""Limit of the relative distance to the KL target."""
Moments = dict[str, float]
"""`count`, `mean` and `squares`: the number of rewards, their mean, and Σ (R − mean)²."""


def entropy_bonus(config: Config, coef: float, last_entropy: float | None) -> float:
    """Return a step's coefficient: `coef` or, with a target, 0 if the previous step's mean entropy
    in nats per token was above the target or is None, unknown.

    Reference: Skywork-OR1, https://arxiv.org/abs/2505.22312 (adaptive entropy control).
    """
    target = config.entropy_target
    if target is None or (last_entropy is not None and last_entropy <= target):
        return coef
    return 0.0


def next_entropy_coef(config: Config, coef: float, entropy: float) -> float:
    """Return `coef` moved by `entropy_coef_step`: up if a step's mean `entropy` was at most the
    target, else down; within 0 and `entropy_coef_max`. Without a target it stays.

    The reference is the same. TRL does this too; verl has no target.
    """
    if config.entropy_target is None:
        return coef
    change = config.entropy_coef_step
    if entropy > config.entropy_target:
        change = -change
    return min(max(coef + change, 0.0), config.entropy_coef_max)


def uncertain(entropies: Tensor, share: float) -> Tensor:
    """Select the tokens of highest entropy: at or above the (1 − share) quantile, interpolated.

    Forking tokens, at which the policy hesitates, carry nearly all that is learned.

    Args:
        entropies: [n] of all tokens of the optimizer step, in nats.
        share: in (0, 1].
    Returns:
        [n] bool.

    Reference: https://arxiv.org/abs/2506.01939; TRL's `top_entropy_quantile`.
    """
    threshold = np.quantile(entropies.double().numpy(), 1 - share)
    return entropies.double() >= torch.tensor(threshold)


def next_kl_coef(config: Config, coef: float, kl: float, num_rollouts: int) -> float:
    """β (1 + e · min(1, num_rollouts / kl_horizon)) with e = clip(KL / kl_target − 1, −0.2, 0.2):
    up if a step's KL was above the target, else down. Without a target it stays.

    A step moves it by at most a fifth. Without the 1, one of more than five horizons could make it
    negative, and the KL would then be rewarded.

    Args:
        coef: β of the step.
        kl: the step's KL to the reference, by `kl_estimator`, in nats per token.
        num_rollouts: rollouts of the step.

    Reference: https://arxiv.org/abs/1909.08593, section 2.2, whose K_β is num_rollouts /
    kl_horizon, there well below 1; their KL is per completion, here and in verl it is per token.
    """
    if config.kl_target is None:
        return coef
    error = min(max(kl / config.kl_target - 1, -MOST_ERROR), MOST_ERROR)
    return coef * (1 + error * min(1, num_rollouts / config.kl_horizon))


def nll_weights(config: Config, batch: Batch, members: list[int]) -> Tensor | None:
    """nll_coef / M for each of the M tokens of the step's rollouts whose reward is at least
    `nll_reward`; 0 elsewhere. None without `nll_coef`.

    The mean is over these tokens in the whole optimizer step, with any aggregation of the policy's
    loss. Rollouts that are masked have no loss here either.

    Args:
        batch: with rewards [B].
        members: rollouts of the step.
    Returns:
        [N] float64.

    Reference: VAPO, https://arxiv.org/abs/2504.05118 (positive-example LM loss), whose positive
    examples are the correct answers.
    """
    if not config.nll_coef:
        return None
    good = [row for row in members if batch.rewards[row] >= config.nll_reward]
    _, positions = batch.counted_tokens(good)
    of_tokens = torch.zeros(len(batch.old_logprobs), dtype=torch.float64)
    of_tokens[positions] = config.nll_coef / max(len(positions), 1)
    return of_tokens


def reward_moments(before: Moments | None, rewards: Tensor) -> Moments:
    """Return the moments of all rewards in a policy's trainings, `before` and these [B]; NaN, a
    missing reward, does not count.

    Reference: Chan, Golub, LeVeque 1979, Updating Formulae for Computing Sample Variances, 2.1.
    """
    before = before or {"count": 0, "mean": 0.0, "squares": 0.0}
    scored = rewards[~rewards.isnan()].double()
    count = before["count"] + len(scored)
    if not len(scored):
        return before
    mean = float(scored.mean())
    distance = mean - before["mean"]
    return {
        "count": count,
        "mean": before["mean"] + distance * len(scored) / count,
        "squares": before["squares"]
        + float((scored - mean).square().sum())
        + distance**2 * before["count"] * len(scored) / count,
    }


def reward_scale(moments: Moments) -> float:
    """Return 1 / the unbiased (n−1) standard deviation; 1 if all rewards were equal.

    The mean is not subtracted.

    Reference: https://arxiv.org/abs/2005.12729 (reward scaling), with one reward a rollout.
    """
    if moments["count"] < 2 or not moments["squares"] > 0:
        return 1.0
    return 1 / math.sqrt(moments["squares"] / (moments["count"] - 1))
