"""More advantages, in the form of advantages.py: pure functions, some with arguments besides
rewards and groups.

    length_weighted(rewards, groups, lengths=lengths)

Not of the spine: advantages.py shows what an advantage is.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quiver.stages.model.ragged import Ragged

from .advantages import gae, group_normalized, group_statistics, group_sums


def batch_scaled(rewards: Tensor, groups: Tensor, *, epsilon: float = 1e-4) -> Tensor:
    """A_i = (R_i − mean_g) / (std_B(R) + epsilon): the baseline is the group's mean, and one scale
    serves all groups, the unbiased (n−1) standard deviation of the batch's scored rewards.

    A group of nearly equal rewards is not amplified, unlike in `group_normalized`. The deviation is
    taken of the raw rewards, so differences between prompts count in it;
    `batch_normalized_baseline` uses the deviation of R − mean_g. With a single group it is
    `group_normalized`. TRL's `scale_rewards = "batch"` is the same.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: Lite PPO, https://arxiv.org/abs/2508.08221.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    std = rewards[~rewards.isnan()].std()
    return torch.where(comparable, (rewards - sums / counts) / (std + epsilon), torch.nan).float()


def part_normalized(
    rewards: Tensor,
    groups: Tensor,
    *,
    parts: Tensor,
    part_weights: Tensor,
    epsilon: float = 1e-4,
) -> Tensor:
    """A_i = S_i / (std_B(S) + epsilon) with S_i = Σ_k w_k (r_ik − mean_g(r_k)) / (std_g(r_k) +
    epsilon), k over the parts of the reward that rollout i has.

    Before the weights, each part counts the same in its group, however large its numbers are.
    Rollouts with equal sums of different parts can get different advantages. The mean of S over the
    batch is 0 by construction and is not subtracted again, so a group in which every part is equal
    has exactly 0. With one part and one group it is `group_normalized`, up to epsilon.

    TRL's `multi_objective_aggregation = "normalize_then_sum"` is the same. verl normalises S over
    tokens, so that a long completion counts more; here each rollout counts once.

    Args:
        rewards: [B] float; NaN = not scored: the rollout's parts are ignored.
        groups: [B] int64; rollouts of one prompt have one number.
        parts: [B, P] r_ik before their weights; NaN = part k does not apply.
        part_weights: [B, P] w_k, equal within a group; not read if the part is NaN.
        epsilon: added to each standard deviation.
    Returns:
        [B] float32; NaN if the rollout is not scored, or none of its parts can be compared within
        its group.

    Reference: GDPO, https://arxiv.org/abs/2601.05242.
    """
    is_scored = ~rewards.isnan()
    total = torch.zeros(len(rewards), dtype=torch.float64)
    comparable = torch.zeros(len(rewards), dtype=torch.bool)
    for part, weights in zip(parts.unbind(1), part_weights.unbind(1), strict=True):
        normalized = group_normalized(torch.where(is_scored, part, torch.nan), groups, epsilon)
        has_part = ~normalized.isnan()
        total += torch.where(has_part, weights * normalized.double(), 0.0)
        comparable |= has_part
    std = total[comparable].std()
    return torch.where(comparable, total / (std + epsilon), torch.nan).float()


def pass_at_k(rewards: Tensor, groups: Tensor, *, k: int = 4, epsilon: float = 1e-8) -> Tensor:
    """A_i = (mean of max R over the k-subsets of the group that hold i − mean over all of them) /
    (std over all of them + epsilon), the biased standard deviation.

    It measures what a rollout adds to the best of k answers. Once a prompt is often solved, right
    answers teach little, and wrong ones are not pushed down. Nothing is sampled: with the group's n
    scored rewards in order, R_0 ≤ … ≤ R_{n−1}, R_j is the best of C(j, k−1) subsets. For rewards of
    0 and 1, m of them 0, it is the paper's form: the mean is M = 1 − C(m, k) / C(n, k), the
    deviation √(M (1−M)), the mean over subsets with a given wrong answer is 1 − C(m−1, k−1) /
    C(n−1, k−1), and with a given right one it is 1. With k = 1 it is `group_normalized` with the
    biased deviation.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
        k: ≥ 1.
        epsilon: added to the standard deviation, in units of reward.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has at most k scored rollouts
        (with k there is one subset, and nothing to compare it with).

    Reference: Pass@k Training, https://arxiv.org/abs/2508.10751 (analytical derivation); for
    rewards other than 0 and 1, the same means over subsets.
    """
    advantages = torch.full_like(rewards, torch.nan, dtype=torch.float64)
    for group in groups.unique():
        members = ((groups == group) & ~rewards.isnan()).nonzero()[:, 0]
        n = len(members)
        if n <= k or n < 2:
            continue
        ascending, order = rewards[members].double().sort()
        ascending = ascending - ascending[-1]  # so that equal rewards give exactly 0
        places = range(n)
        num_subsets = math.comb(n, k)
        shares = ascending.new_tensor([math.comb(j, k - 1) / num_subsets for j in places])
        mean = (shares * ascending).sum()
        std = (shares * (ascending - mean).square()).sum().sqrt()
        # in a subset that holds a given rollout, the best is that rollout or one of a later place j
        num_others = math.comb(n - 1, k - 1)
        own_shares = ascending.new_tensor([math.comb(j, k - 1) / num_others for j in places])
        shares_above = ascending.new_tensor(
            [math.comb(j - 1, k - 2) / num_others if j and k > 1 else 0.0 for j in places]
        )
        gains = shares_above * ascending
        gains_above = gains.sum() - gains.cumsum(0)
        means = own_shares * ascending + gains_above
        advantages[members[order]] = (means - mean) / (std + epsilon)
    return advantages.float()


def turn_leave_one_out(rewards: Tensor, offsets: Tensor, groups: Tensor) -> Tensor:
    """A_ik = G_ik − mean over the others j of the group of G_jk, with G_ik = Σ_{l ≥ k} r_il, the
    reward of turn k and later turns; G_jk is 0 if rollout j ended before turn k.

    A turn is not credited with earlier rewards. The baseline does not depend on what rollout i did,
    so the policy gradient stays unbiased. MT-GRPO takes the mean over the rollouts that reached
    turn k, rollout i included, which does depend on it: if some rollouts end earlier, its gradient
    is biased, with either sign. With one turn it is `leave_one_out`.

    Args:
        rewards: [T] float, one for each turn; NaN = its rollout is not scored.
        offsets: [B+1] int64; rollout i has the turns `offsets[i]:offsets[i+1]`, at least one.
        groups: [B] int64; rollouts of one prompt have one number.
    Returns:
        [T], dtype of `rewards`; NaN if the rollout is not scored or its group has fewer than 2
        scored rollouts.

    Reference: RLOO, https://arxiv.org/abs/2402.14740, applied to each turn's return to go; MT-GRPO:
    https://arxiv.org/abs/2505.11821.
    """
    turns = Ragged(rewards.double(), offsets)
    to_go = turns.values.clone()
    ends = offsets[1:] - 1
    for steps_from_end in range(1, int(turns.lengths.max()) if len(turns) else 0):
        t = (ends - steps_from_end)[turns.lengths > steps_from_end]
        to_go[t] += to_go[t + 1]
    first_turns = to_go[offsets[:-1]]
    _, counts, _, comparable = group_statistics(first_turns, groups)
    places = torch.arange(len(to_go)) - offsets[:-1].repeat_interleave(turns.lengths)
    of_group = groups.repeat_interleave(turns.lengths)
    num_places = int(places.max()) + 1 if len(places) else 1
    sums = group_sums(to_go.nan_to_num(0.0), of_group * num_places + places)
    mean_of_others = (sums - to_go) / (counts - 1).repeat_interleave(turns.lengths)
    comparable = comparable.repeat_interleave(turns.lengths)
    return torch.where(comparable, to_go - mean_of_others, torch.nan).to(rewards.dtype)


def reward_to_go(rewards: Tensor, offsets: Tensor, *, gamma: float = 1.0) -> Tensor:
    """A_t = Σ_{k ≥ t} γ^{k−t} r_k over the rollout's tokens from t on.

    It covers only what a token can still change: if the rewards include the KL to the reference, a
    token does not answer for the KL of earlier tokens. It is `gae` with all values 0 and λ = 1;
    with one reward on the last token and γ = 1 every token has the rollout's reward. The caller
    whitens it over the batch's tokens, as REINFORCE++ does.

    Args:
        rewards: [N] of each token; the rollout's own reward is on its last token.
        offsets: [B+1] int64.
        gamma: γ in [0, 1].
    Returns:
        [N] float32.

    Reference: REINFORCE++, https://arxiv.org/abs/2501.03262.
    """
    to_come, _ = gae(rewards, torch.zeros_like(rewards), offsets, gamma=gamma, gae_lambda=1.0)
    return to_come


def optimal_token_baseline(
    rewards: Tensor,
    offsets: Tensor,
    groups: Tensor,
    logprobs: Tensor,
    collisions: Tensor,
    epsilon: float = 1e-8,
) -> Tensor:
    """A_t = G_t − Σ_j G_jt W_jt / (Σ_j W_jt + epsilon) over the group's rollouts j that have a
    token t, with G the reward to go and W_t = Σ_{s ≤ t} (1 − 2 π_s + Σ_v π_v²).

    1 − 2 π_s + Σ π² is the squared norm of the gradient of logprob s by the logits. So W_t
    estimates the squared norm of the rollout's gradient up to token t, and the baseline of least
    variance follows the rollouts with the largest. With equal weights, and the reward on the last
    token, it is `group_centered` over the rollouts that have a token t. A token that only one
    rollout of the group reaches has 0.

    verl's `optimal_token_baseline` with `handle_zero_tail` off is the same. With it on (verl's
    default), a token that only one rollout reaches has the raw reward, as a group of one always
    has. If verl corrects for the engine's gap, the squared weight counts in W.

    Args:
        rewards: [N] of each token; the rollout's own reward is on its last token.
        offsets: [B+1] int64.
        groups: [B] int64; rollouts of one prompt have one number.
        logprobs: [N] log π of each sampled token.
        collisions: [N] Σ_v π_v² of the distribution that the token was drawn from.
        epsilon: added to the sum of weights.
    Returns:
        [N] float32.

    Reference: OTB, https://arxiv.org/abs/2602.07078.
    """
    to_come = Ragged(reward_to_go(rewards, offsets).double(), offsets)
    energies = 1 - 2 * logprobs.double().exp() + collisions.double()
    before = energies.cumsum(0) - energies
    starts = offsets[:-1][to_come.segment_ids]
    weights = energies.cumsum(0) - before[starts]
    places = torch.arange(len(rewards)) - starts
    longest = int(to_come.lengths.max()) if len(groups) else 0
    together = groups[to_come.segment_ids] * longest + places  # one number a group and place
    counts = group_sums(torch.ones_like(weights), together)
    centered = to_come.values - group_sums(to_come.values, together) / counts
    total = group_sums(weights, together) + epsilon
    return (centered - group_sums(weights * centered, together) / total).float()


def length_weighted(rewards: Tensor, groups: Tensor, *, lengths: Tensor) -> Tensor:
    """A_i = R_i − Σ_j l_j R_j / Σ_j l_j over the group's scored rollouts, with l_j the tokens of
    rollout j.

    This is the baseline of least variance if the squared norm of a completion's gradient is
    proportional to its length. It holds for samples of the current policy: one mini-batch, one
    epoch. With equal lengths it is `group_centered`.

    For a group of one, verl uses the raw reward as advantage; here it is dropped.

    Args:
        rewards: [B] float; NaN = not scored.
        groups: [B] int64; rollouts of one prompt have one number.
        lengths: [B] int64, tokens of each completion.
    Returns:
        [B] float32; NaN if the rollout is not scored or its group has fewer than 2 scored
        rollouts.

    Reference: OPO, https://arxiv.org/abs/2505.23585.
    """
    rewards, counts, sums, comparable = group_statistics(rewards, groups)
    centered = rewards - sums / counts  # so that equal rewards give exactly 0
    scored_lengths = torch.where(rewards.isnan(), 0.0, lengths.double())
    weighted = group_sums(torch.where(rewards.isnan(), 0.0, scored_lengths * centered), groups)
    total = group_sums(scored_lengths, groups).clamp(min=1)
    return torch.where(comparable, centered - weighted / total, torch.nan).float()
