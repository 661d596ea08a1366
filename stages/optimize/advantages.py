"""Advantages: the value of each rollout relative to its group or to the batch.

Pure functions of flat tensors. Legend: B rollouts, groups numbered 0 … n-1. A reward of NaN means
"not scored": it is left out of every mean, and its rollout has no advantage. A rollout without an
advantage has NaN in the result, never 0; the caller, rollouts.py, drops and counts it. `gae`, the
one for critics, is called by critic.py. More are in estimators.py.

Sums run in float64 over float32 rewards, so equal rewards give exactly 0, not 1e-9 / 1e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_normalized(rewards: Tensor, groups: Tensor, epsilon: float = 1e-4) -> Tensor:
    """A_i = (R_i − mean_g) / (std_g + epsilon), with the unbiased (n−1) standard deviation of the
    group's scored rewards.

    Comparable over prompts of different reward scale. Without the division it is `group_centered`;
    for two rollouts with different rewards it is ±1/√2, up to epsilon.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    centered = torch.where(rewards.isnan(), 0.0, rewards - sums / counts)
    std = (group_sums(centered**2, groups) / (counts - 1)).sqrt()
    return torch.where(comparable, centered / (std + epsilon), torch.nan).float()


def group_centered(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i − mean_g over the group's scored rewards.

    Without the division by the standard deviation, prompts that are nearly always or never solved
    are not amplified. It equals `leave_one_out` times (n−1)/n.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    return torch.where(comparable, rewards - sums / counts, torch.nan).float()


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """A_i = R_i − mean of the other scored rewards in the group.

    The mean does not depend on R_i, so the policy gradient stays unbiased. It equals
    `group_centered` times n/(n−1).

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: RLOO, https://arxiv.org/abs/2402.14740.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    mean_of_others = (sums - rewards) / (counts - 1)
    return torch.where(comparable, rewards - mean_of_others, torch.nan).float()


def batch_normalized(rewards: Tensor, groups: Tensor, epsilon: float = 1e-8) -> Tensor:
    """A_i = (R_i − mean_B) / (std_B + epsilon), with the unbiased (n−1) standard deviation over all
    scored rewards.

    All prompts share one mean. Groups are ignored, so one rollout a prompt is enough, and a
    hard prompt looks the same as a bad answer. With a single group it is `group_normalized`, up to
    epsilon. B is the stage's whole dataset, before mini-batches and before any filter except for
    null rewards.

    The paper includes the KL to the reference in the reward and normalises each token's return.
    Without that KL this is the same except for the weights: verl and OpenRLHF take mean and
    variance over tokens, so that a long completion counts more; here each rollout counts once.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; not used.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN if the rollout is not scored; all NaN if fewer than 2 are; 0 if all rewards
        are equal.

    Reference: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    return group_normalized(rewards, torch.zeros_like(groups), epsilon)


def batch_normalized_baseline(rewards: Tensor, groups: Tensor, epsilon: float = 1e-8) -> Tensor:
    """A_i = C_i / (std_B(C) + epsilon) with C_i = R_i − mean_g, the unbiased standard deviation
    over the batch.

    The group's mean is subtracted, as in `group_centered`, and one scale serves all groups, so
    nearly equal rewards are not amplified, unlike in `group_normalized`. The batch mean of C is 0
    by construction and is not subtracted again: a group of equal rewards keeps exactly 0. With a
    single group it is `group_normalized`, up to epsilon.

    As in `batch_normalized`, each rollout counts once, while verl and OpenRLHF weigh by tokens. For
    a group of one, verl uses the raw reward as advantage; here it is dropped.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has fewer than 2 scored
        rollouts; such rollouts do not count in the standard deviation.

    Reference: REINFORCE++, https://arxiv.org/abs/2501.03262 (the variant with a baseline).
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    centered = torch.where(comparable, rewards - sums / counts, 0.0)
    std = (centered.square().sum() / (comparable.sum() - 1)).sqrt()
    return torch.where(comparable, centered / (std + epsilon), torch.nan).float()


def gae(
    rewards: Tensor,
    values: Tensor,
    offsets: Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    last_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """δ_t = r_t + γ V_{t+1} − V_t; A_t = δ_t + γλ A_{t+1}; returns_t = A_t + V_t.

    λ trades the critic's bias for the reward's variance: with λ = 0 A_t is δ_t; with λ = 1 it is
    the discounted reward still to come minus V_t, and the return does not depend on the critic,
    unless it is bootstrapped. t counts completion tokens only, and nothing passes from one rollout
    to the next. Systems that iterate over padded rows must not carry values through masked tokens.

    Args:
        rewards: [N] of each token; the rollout's own reward is on its last token.
        values: [N] V_t, value of the state before token t.
        offsets: [B+1] int64.
        gamma: γ in [0, 1].
        gae_lambda: λ in [0, 1].
        last_values: [B] V of the state after the last token. Default: 0, as after an end token.
    Returns:
        advantages [N] and returns [N], float32, without gradient. Computed in float64.

    Reference: https://arxiv.org/abs/1506.02438, equations 16 to 18.
    """
    values = values.detach().double()
    rewards = rewards.double()
    starts = offsets[:-1]
    ends = offsets[1:] - 1
    advantages = torch.zeros_like(values)
    next_advantages = values.new_zeros(len(starts))  # A_{t+1} of each rollout
    next_values = values.new_zeros(len(starts))  # V_{t+1} of each rollout
    if last_values is not None:
        next_values.copy_(last_values)
    longest = int(offsets.diff().max()) if len(starts) else 0
    for steps_from_end in range(longest):
        rows = (ends - steps_from_end >= starts).nonzero()[:, 0]
        t = ends[rows] - steps_from_end
        delta = rewards[t] + gamma * next_values[rows] - values[t]
        advantages[t] = delta + gamma * gae_lambda * next_advantages[rows]
        next_advantages[rows] = advantages[t]
        next_values[rows] = values[t]
    return advantages.float(), (advantages + values).float()


def whitened(advantages: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(A − mean) / (std + epsilon) over the batch's tokens, with the unbiased (n−1) standard
    deviation.

    For advantages on a critic's scale; applied after the returns, which stay in units of reward.

    Args:
        advantages: [N], of all tokens of the batch, before mini-batches.
        epsilon: added to the standard deviation.
    Returns:
        [N] float32; 0 if there is only one token.
    """
    advantages = advantages.double()
    centered = advantages - advantages.mean()
    std = (centered.square().sum() / max(len(advantages) - 1, 1)).sqrt()
    return (centered / (std + epsilon)).float()


def zero_variance(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return true where max_g R = min_g R: a comparison within the group teaches nothing.

    It is false for the only scored rollout of a group: an algorithm that needs no group learns from
    it.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
    Returns:
        [B] bool: the rollout's group has at least two scored rewards, all of them equal.
    """
    rewards, counts, sums, _ = group_statistics(rewards, groups)
    distances = torch.where(rewards.isnan(), 0.0, (rewards - sums / counts).abs())
    return (group_sums(distances, groups) == 0) & (counts >= 2)


def group_statistics(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each rollout, [B] each: its reward in float64, the number of scored rewards in its
    group, their sum, and whether it can be compared: it and at least one other are scored."""
    rewards = rewards.double()
    scored = ~rewards.isnan()
    counts = group_sums(scored.double(), groups)
    sums = group_sums(torch.where(scored, rewards, 0.0), groups)
    return rewards, counts, sums, scored & (counts >= 2)


def group_sums(terms: Tensor, groups: Tensor) -> Tensor:
    """Return [B] the sum of `terms` [B] over each rollout's group."""
    num_groups = int(groups.max()) + 1 if len(groups) else 0
    return terms.new_zeros(num_groups).index_add(0, groups, terms)[groups]
