"""Advantages against float64 loops written from the papers' formulas, and the relations between
them."""

import itertools
import math
from functools import partial
from statistics import fmean, pstdev, stdev

import numpy as np
import pytest
import torch

from quiver.stages.optimize import advantages, estimators

NAN = float("nan")
REWARDS = [1.0, 0.0, 0.25, NAN, 2.0, 2.0, -1.0, 0.5, 3.0, NAN, 0.1, 0.1, 0.1]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4]
LENGTHS = [3, 1, 5, 100, 2, 5, 9, 4, 7, 100, 1, 2, 30]
ALL = [
    advantages.group_normalized,
    advantages.group_centered,
    advantages.leave_one_out,
    advantages.batch_normalized,
    advantages.batch_normalized_baseline,
    estimators.batch_scaled,
    partial(estimators.length_weighted, lengths=torch.tensor(LENGTHS)),
]
NAMES = [*(function.__name__ for function in ALL[:-1]), "length_weighted"]


def _expected() -> dict[str, np.ndarray]:
    """Plain loops in float64 from the papers' equations; the rewards as float32 holds them."""
    rewards = np.array(REWARDS, np.float32).astype(np.float64)
    scored = [reward for reward in rewards if not math.isnan(reward)]
    mean, std, of_others, weighted = (np.full(len(rewards), NAN) for _ in range(4))
    for i, group in enumerate(GROUPS):
        peers = [j for j, g in enumerate(GROUPS) if g == group and not math.isnan(rewards[j])]
        if i in peers and len(peers) > 1:
            mean[i] = fmean(rewards[j] for j in peers)
            std[i] = stdev(rewards[j] for j in peers)
            of_others[i] = fmean(rewards[j] for j in peers if j != i)
            total = sum(LENGTHS[j] for j in peers)
            weighted[i] = sum(LENGTHS[j] * rewards[j] for j in peers) / total
    centered = rewards - mean
    return {
        "group_normalized": centered / (std + 1e-4),
        "group_centered": centered,
        "leave_one_out": rewards - of_others,
        "batch_normalized": (rewards - fmean(scored)) / (stdev(scored) + 1e-8),
        "batch_normalized_baseline": centered / (stdev(centered[~np.isnan(centered)]) + 1e-8),
        "batch_scaled": centered / (stdev(scored) + 1e-4),
        "length_weighted": rewards - weighted,
    }


@pytest.mark.parametrize("function, name", [*zip(ALL, NAMES, strict=True)], ids=NAMES)
def test_golden(function, name):
    """In another order of the rollouts too; a group of equal rewards has exactly 0."""
    rewards, groups = torch.tensor(REWARDS), torch.tensor(GROUPS)
    found = function(rewards, groups)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), _expected()[name], rtol=1e-6, atol=1e-7)
    assert name == "batch_normalized" or found[-3:].tolist() == [0.0] * 3
    if name != "length_weighted":
        order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(
            function(rewards[order], groups[order]), found[order], equal_nan=True
        )
        for reward in (0.1, 1 / 3, 1e6, -7.7):
            equal = function(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64))
            assert equal.tolist() == [0.0] * 7


ONE_GROUP = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.zeros(4, dtype=torch.int64)
CENTERED = advantages.group_centered(*ONE_GROUP)
TOKENS = torch.tensor([0, 1, 2, 3, 4])
REDUCES_TO = {
    "one part": (
        estimators.part_normalized(
            *ONE_GROUP, parts=ONE_GROUP[0][:, None], part_weights=torch.full((4, 1), 7.0), epsilon=0
        ),
        advantages.group_normalized(*ONE_GROUP, 0.0),
    ),
    "equal weights": (
        estimators.optimal_token_baseline(
            ONE_GROUP[0], TOKENS, ONE_GROUP[1], torch.full((4,), -30.0), torch.zeros(4)
        ),
        CENTERED,
    ),
    "one turn": (
        estimators.turn_leave_one_out(ONE_GROUP[0], TOKENS, ONE_GROUP[1]),
        CENTERED * 4 / 3,
    ),
    "values of 0": (
        estimators.reward_to_go(ONE_GROUP[0], torch.tensor([0, 3, 4])),
        torch.tensor([1.5, 0.5, 0.5, 0.2]),
    ),
}


@pytest.mark.parametrize("name", REDUCES_TO)
def test_what_it_reduces_to(name):
    found, expected = REDUCES_TO[name]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "function", [advantages.batch_normalized, advantages.batch_normalized_baseline]
)
@pytest.mark.parametrize("rewards", [[], [NAN, NAN], [1.0, NAN], [3.0]])
def test_fewer_than_two_scored_rollouts_have_no_batch_statistics(function, rewards):
    found = function(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64))
    assert found.shape == (len(rewards),) and found.isnan().all()


def test_zero_variance_looks_at_scored_rewards_only():
    rewards, groups = (
        torch.tensor([1.0, 1.0, NAN, 0.0, 1.0, NAN, 1.0, NAN]),
        torch.tensor([0, 0, 0, 1, 1, 2, 3, 3]),
    )
    assert advantages.zero_variance(rewards, groups).tolist() == [True] * 3 + [False] * 5


def test_gdpo_normalises_each_part_in_its_group_and_the_sum_over_the_batch():
    """The paper's three steps by plain loops. One part is missing in places, one rollout has no
    reward though it has parts."""
    rewards = np.array([1.0, 1.0, 1.0, NAN, 2.0, 0.0, 1.0, 0.5, 0.1, 0.1])
    groups = [0, 0, 0, 0, 1, 1, 1, 2, 3, 3]
    parts = np.array(
        [
            [1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [9.0, 9.0], [1.0, NAN], [0.0, 0.3], [1.0, 0.2],
            [1.0, 1.0], [0.1, 0.1], [0.1, 0.1],
        ]
    )  # fmt: skip
    weights = np.where(np.array(groups)[:, None] == 1, [[2.0, 0.25]], [[1.0, 3.0]])
    sums = np.full(len(groups), NAN)
    for members in ([0, 1, 2], [4, 5, 6], [8, 9]):  # not the unscored one, nor the group of one
        mean, std = np.nanmean(parts[members], 0), np.nanstd(parts[members], 0, ddof=1)
        normalized = (parts[members] - mean) / (std + 1e-4)
        sums[members] = np.nansum(weights[members] * normalized, 1)
    assert np.nanmean(sums) == pytest.approx(0.0, abs=1e-12)
    found = estimators.part_normalized(
        torch.tensor(rewards).float(),
        torch.tensor(groups),
        parts=torch.tensor(parts),
        part_weights=torch.tensor(weights),
    )
    expected = sums / (np.nanstd(sums, ddof=1) + 1e-4)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert found[-2:].tolist() == [0.0, 0.0]  # every part equal
    assert found[0] < -0.1 and found[1] > 0.1  # equal sums of unequal parts


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_pass_at_k_is_the_mean_over_all_subsets_of_k(k):
    """Every k of each group's scored rewards is looked at, in groups with ties, of more and of not
    more than k."""
    rewards = [0.0, 1.0, 0.0, 0.25, NAN, 2.0, 2.0, -1.0, 0.5, 3.0, 0.1, 0.1, 0.1, 0.1, 0.1, 7.0]
    groups = [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    rewards = np.array(rewards, np.float32).astype(np.float64)
    expected = [NAN] * len(rewards)
    for group in set(groups):
        members = [
            i for i, other in enumerate(groups) if other == group and not math.isnan(rewards[i])
        ]
        if len(members) <= k:
            continue
        subsets = list(itertools.combinations(members, k))
        best = {subset: max(rewards[i] for i in subset) for subset in subsets}
        mean, std = fmean(best.values()), pstdev(best.values())
        for i in members:
            own = [value for subset, value in best.items() if i in subset]
            expected[i] = (fmean(own) - mean) / (std + 1e-8)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(2))
    found = torch.empty(len(rewards))
    found[order] = estimators.pass_at_k(
        torch.tensor(rewards).float()[order], torch.tensor(groups)[order], k=k
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert found[10:15].tolist() == [0.0] * 5 and found[15].isnan()
    assert k < 4 or found[:5].isnan().all()


def test_the_optimal_token_baseline_is_the_mean_weighted_by_the_gradient_so_far():
    """By plain loops over groups, places and rollouts of 3, 1, 2 and 2, 2 tokens, with a reward on
    every token; the last group has equal rewards."""
    lengths, groups = [3, 1, 2, 2, 2], [4, 4, 4, 1, 1]
    numbers = np.random.default_rng(5)
    rewards = [numbers.normal(size=n).astype(np.float32).astype(float) for n in lengths[:3]]
    rewards += [np.array([0.0, 0.1], np.float32).astype(float)] * 2
    logprobs = [-numbers.exponential(size=n) for n in lengths]
    collisions = [np.exp(2 * row) + 0.1 * numbers.random(len(row)) for row in logprobs]
    expected = []
    for i, length in enumerate(lengths):
        for t in range(length):
            total = weighted = 0.0
            for j, other in enumerate(lengths):
                if groups[j] == groups[i] and other > t:
                    weight = sum(
                        1 - 2 * math.exp(logprobs[j][s]) + collisions[j][s] for s in range(t + 1)
                    )
                    total += weight
                    weighted += weight * sum(rewards[j][t:])
            expected.append(sum(rewards[i][t:]) - weighted / total)
    found = estimators.optimal_token_baseline(
        torch.tensor(np.concatenate(rewards)),
        torch.tensor([0, 3, 4, 6, 8, 10]),
        torch.tensor(groups),
        torch.tensor(np.concatenate(logprobs)),
        torch.tensor(np.concatenate(collisions)),
    )
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert found[2] == 0.0 and found[6:].tolist() == [0.0] * 4  # no other is so long; all equal
