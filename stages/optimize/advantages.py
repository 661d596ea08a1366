"""Advantages: what each rollout is worth against its own group, or against the batch. Pure
functions of flat tensors.

Legend: B rollouts, groups numbered 0 … n-1. A reward of NaN means "not scored": it is left out of
every mean, and its rollout has no advantage. A rollout without an advantage is NaN in the result,
never 0; the caller drops and counts it.

Sums run in float64 over float32 rewards, so they are exact for equal rewards: these give exactly 0,
not 1e-9 / 1e-4.
"""

from __future__ import annotations

import torch


def group_normalized(
    rewards: torch.Tensor, groups: torch.Tensor, epsilon: float = 1e-4
) -> torch.Tensor:
    """A_i = (R_i − mean_g) / (std_g + epsilon), with the unbiased (n−1) standard deviation of the
    group's scored rewards.

    Comparable over prompts of different reward scale. Without the division it is `group_centered`;
    for two rollouts with different rewards it is ±1/√2, up to epsilon.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt bear one number.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN where the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1.2.
    """
    values, count, total = _sums(rewards, groups)
    deviation = torch.where(values.isnan(), 0.0, values - (total / count)[groups])
    squares = torch.zeros_like(total).index_add(0, groups, deviation**2)
    std = (squares / (count - 1)).sqrt()
    return _where_grouped(deviation / (std[groups] + epsilon), values, count, groups)


def group_centered(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """A_i = R_i − mean_g over the group's scored rewards.

    Without the division by the standard deviation, questions that are nearly always or never solved
    are not blown up. It equals `leave_one_out` times (n−1)/n.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt bear one number.
    Returns:
        [B] float32; NaN where the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: Dr. GRPO, https://arxiv.org/abs/2503.20783, section 3.2.
    """
    values, count, total = _sums(rewards, groups)
    return _where_grouped(values - (total / count)[groups], values, count, groups)


def leave_one_out(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """A_i = R_i − mean of the other scored rewards in the group.

    The baseline does not depend on R_i, so the policy gradient stays unbiased. It equals
    `group_centered` times n/(n−1).

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt bear one number.
    Returns:
        [B] float32; NaN where the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: RLOO, https://arxiv.org/abs/2402.14740.
    """
    values, count, total = _sums(rewards, groups)
    others = (total[groups] - values) / (count[groups] - 1)
    return _where_grouped(values - others, values, count, groups)


def batch_normalized(
    rewards: torch.Tensor, groups: torch.Tensor, epsilon: float = 1e-8
) -> torch.Tensor:
    """A_i = (R_i − mean_B) / (std_B + epsilon), with the unbiased (n−1) standard deviation over all
    scored rewards.

    One baseline for every prompt: groups are not looked at, so one rollout a prompt is enough, and
    hard prompts are not told from bad answers. With a single group it is `group_normalized`, up to
    epsilon. B is the whole dataset that the stage was given, before mini-batches and before any
    filter but the null one.

    The paper takes the KL to the reference into the reward and normalises each token's return;
    without that KL this is the same but for the weights: verl and OpenRLHF take mean and variance
    over tokens, so that a long completion counts more, here each rollout counts once.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; not used.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN where the rollout is not scored; all NaN where fewer than 2 are; 0 where
        all rewards are equal.

    Reference: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    return group_normalized(rewards, torch.zeros_like(groups), epsilon)


def batch_normalized_baseline(
    rewards: torch.Tensor, groups: torch.Tensor, epsilon: float = 1e-8
) -> torch.Tensor:
    """A_i = C_i / (std_B(C) + epsilon) with C_i = R_i − mean_g, the unbiased standard deviation
    over the batch.

    The group's mean is the baseline, as in `group_centered`, and one scale serves all groups, so
    that nearly equal rewards are not blown up as `group_normalized` does. The batch mean of C is 0
    by construction and is not subtracted again: a group of equal rewards keeps exactly 0. With a
    single group it is `group_normalized`, up to epsilon.

    As in `batch_normalized`, each rollout counts once, where verl and OpenRLHF weigh by tokens.
    verl takes the raw reward of a group of one for its advantage; here it is dropped.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt bear one number.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN where the rollout is not scored or its group has fewer than 2 scored
        rollouts; such rollouts do not count in the standard deviation.

    Reference: REINFORCE++, https://arxiv.org/abs/2501.03262 (the variant with a baseline).
    """
    values, count, total = _sums(rewards, groups)
    keep = ~values.isnan() & (count[groups] >= 2)
    centered = torch.where(keep, values - (total / count)[groups], 0.0)
    std = (centered.square().sum() / (keep.sum() - 1)).sqrt()
    return _where_grouped(centered / (std + epsilon), values, count, groups)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    offsets: torch.Tensor,
    *,
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    last_values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """δ_t = r_t + γ V_{t+1} − V_t; A_t = δ_t + γλ A_{t+1}; returns_t = A_t + V_t.

    λ trades the critic's bias for the reward's variance: with λ = 0 A_t is δ_t; with λ = 1 it is
    the discounted reward still to come minus V_t, and the return does not depend on the critic,
    unless it is bootstrapped. Only completion tokens are steps, and nothing passes from one rollout
    to the next: other systems that go over a padded row must take care not to carry values through
    masked tokens.

    Args:
        rewards: [N] of each token; the rollout's own reward stands on its last token.
        values: [N] V_t, of the state before token t.
        offsets: [B+1] int64.
        gamma: γ in [0, 1].
        gae_lambda: λ in [0, 1].
        last_values: [B] V of the state after the last token; None for 0, as after an end token.
    Returns:
        advantages [N] and returns [N], float32, without gradient. Computed in float64.

    Reference: https://arxiv.org/abs/1506.02438, equations 16 to 18.
    """
    v, r = values.detach().double(), rewards.double()
    starts, ends = offsets[:-1], offsets[1:] - 1
    following = torch.zeros(len(starts), dtype=v.dtype, device=v.device)
    if last_values is not None:
        following.copy_(last_values)  # a tensor of its own: it is written below
    running, advantages = torch.zeros_like(following), torch.zeros_like(v)
    for back in range(int(offsets.diff().max()) if len(starts) else 0):
        rows = (ends - back >= starts).nonzero()[:, 0]
        at = ends[rows] - back
        delta = r[at] + gamma * following[rows] - v[at]
        running[rows] = delta + gamma * gae_lambda * running[rows]
        following[rows], advantages[at] = v[at], running[rows]
    return advantages.float(), (advantages + v).float()


def whitened(advantages: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """(A − mean) / (std + epsilon) over the batch's tokens, with the unbiased (n−1) standard
    deviation.

    For advantages whose scale a critic decides; taken after the returns, which stay in units of
    reward.

    Args:
        advantages: [N], of all tokens of the batch, before mini-batches.
        epsilon: added to the standard deviation.
    Returns:
        [N] float32; 0 where there is one token only.
    """
    values = advantages.double()
    deviation = values - values.mean()
    std = (deviation.square().sum() / max(len(values) - 1, 1)).sqrt()
    return (deviation / (std + epsilon)).float()


def zero_variance(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """[B] bool: the rollout's group has two scored rewards at least, and all its scored rewards are
    equal: nothing to learn there from a comparison. One alone has no variance: an algorithm that
    needs no group learns from it."""
    n = int(groups.max()) + 1 if len(groups) else 0
    scored = ~rewards.isnan()
    low = rewards.new_full((n,), torch.inf).scatter_reduce(
        0, groups[scored], rewards[scored], "amin"
    )
    high = rewards.new_full((n,), -torch.inf).scatter_reduce(
        0, groups[scored], rewards[scored], "amax"
    )
    return ((low == high) & (groups[scored].bincount(minlength=n) >= 2))[groups]


def _sums(
    rewards: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards in float64, and for each group how many are scored and their sum."""
    values = rewards.double()
    scored = ~values.isnan()
    zeros = values.new_zeros(int(groups.max()) + 1 if len(groups) else 0)
    return (
        values,
        zeros.index_add(0, groups, scored.double()),
        zeros.index_add(0, groups, torch.where(scored, values, 0.0)),
    )


def _where_grouped(
    advantages: torch.Tensor, values: torch.Tensor, count: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    keep = ~values.isnan() & (count[groups] >= 2)
    return torch.where(keep, advantages, torch.nan).float()
