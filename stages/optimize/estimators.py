"""Advantages beside those of advantages.py, of the same form: pure functions, which are given what
they name besides rewards and groups.

    length_weighted(rewards, groups, lengths=lengths)

Not of the spine: advantages.py shows what an advantage is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .advantages import group_statistics, group_sums


def batch_scaled(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """A_i = (R_i − mean_g) / (std_B(R) + epsilon): the group's mean for baseline, and one scale for
    all groups, the unbiased (n−1) standard deviation of the batch's scored rewards.

    A group of nearly equal rewards is not blown up, as `group_normalized` does. The deviation is of
    the rewards as they are, so how far prompts are apart counts in it;
    `batch_normalized_baseline` takes that of R − mean_g. With a single group it is
    `group_normalized`. TRL's `scale_rewards = "batch"`.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt bear one number.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN where the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: Lite PPO, https://arxiv.org/abs/2508.08221.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    std = rewards[~rewards.isnan()].std()
    return torch.where(comparable, (rewards - sums / counts) / (std + epsilon), torch.nan).float()


def length_weighted(rewards: Tensor, groups: Tensor, *, lengths: Tensor) -> Tensor:
    """A_i = R_i − Σ_j l_j R_j / Σ_j l_j over the group's scored rollouts, l_j the tokens of each.

    The baseline of least variance, where the squared norm of a completion's gradient grows with its
    length. It holds for samples of the policy as it is: one mini-batch, one epoch. With equal
    lengths it is `group_centered`.

    verl takes the raw reward of a group of one for its advantage; here it is dropped.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt bear one number.
        lengths: [B] int64, tokens of each completion.
    Returns:
        [B] float32; NaN where the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: OPO, https://arxiv.org/abs/2505.23585.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    centered = rewards - sums / counts  # so that equal rewards give exactly 0
    scored_lengths = torch.where(rewards.isnan(), 0.0, lengths.double())
    weighted = group_sums(torch.where(rewards.isnan(), 0.0, scored_lengths * centered), groups)
    total = group_sums(scored_lengths, groups).clamp(min=1)
    return torch.where(comparable, centered - weighted / total, torch.nan).float()


def over_baseline(rewards: Tensor, groups: Tensor, *, baselines: Tensor) -> Tensor:
    """A_i = R_i − the reward of the policy's greedy answer to the same prompt.

    The greedy answer tells how hard the prompt is for this policy, with no group and no critic: one
    rollout a prompt is enough. It does not depend on what was sampled, so the gradient stays
    unbiased.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; not used.
        baselines: [B] float; NaN = not scored.
    Returns:
        [B] float32; NaN where the rollout or its baseline is not scored.

    Reference: ReMax, https://arxiv.org/abs/2310.10505.
    """
    return (rewards.double() - baselines.double()).float()
