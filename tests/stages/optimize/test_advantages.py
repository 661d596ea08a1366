"""Advantages against float64 loops written from the papers' formulas, and the relations between
them."""

import itertools
import math

import numpy as np
import pytest
import torch

from quiver.stages.optimize import advantages, estimators

NAN = float("nan")
REWARDS = [1.0, 0.0, 0.25, NAN, 2.0, 2.0, -1.0, 0.5, 3.0, NAN, 0.1, 0.1, 0.1]
GROUPS = [0, 0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4, 4]
ALL = [
    advantages.group_normalized,
    advantages.group_centered,
    advantages.leave_one_out,
    advantages.batch_normalized,
    advantages.batch_normalized_baseline,
]


def _expected(name: str) -> list[float]:
    """Plain loops in float64; the rewards as float32 holds them."""
    rewards = np.array(REWARDS, np.float32).astype(np.float64)
    if name.startswith("batch"):
        return _whitened(rewards, name == "batch_normalized_baseline")
    result = []
    for i, group in enumerate(GROUPS):
        peers = [
            rewards[j]
            for j in range(len(GROUPS))
            if GROUPS[j] == group and not math.isnan(rewards[j])
        ]
        others = [
            rewards[j]
            for j in range(len(GROUPS))
            if GROUPS[j] == group and not math.isnan(rewards[j]) and j != i
        ]
        if math.isnan(rewards[i]) or len(peers) < 2:
            result.append(NAN)
            continue
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((x - mean) ** 2 for x in peers) / (len(peers) - 1))
        result.append(
            {
                "group_normalized": (rewards[i] - mean) / (std + 1e-4),
                "group_centered": rewards[i] - mean,
                "leave_one_out": rewards[i] - sum(others) / len(others),
            }[name]
        )
    return result


def _whitened(rewards: np.ndarray, baseline: bool) -> list[float]:
    """(x − mean) / (std + 1e-8) over the batch; x is the reward, or the reward minus its group's
    mean."""
    x = [NAN] * len(rewards)
    for i, group in enumerate(GROUPS):
        peers = [
            rewards[j]
            for j in range(len(GROUPS))
            if GROUPS[j] == group and not math.isnan(rewards[j])
        ]
        if not baseline:
            x[i] = rewards[i]
        elif len(peers) >= 2:
            x[i] = rewards[i] - sum(peers) / len(peers)
    known = [value for value in x if not math.isnan(value)]
    mean = sum(known) / len(known)
    std = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    return [(value - mean) / (std + 1e-8) for value in x]


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_golden(function):
    found = function(torch.tensor(REWARDS), torch.tensor(GROUPS))
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), _expected(function.__name__), rtol=1e-6, atol=1e-7)


def test_golden_by_hand():
    found = advantages.group_normalized(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([-1 / (math.sqrt(2) + 1e-4), 1 / (math.sqrt(2) + 1e-4)])
    assert advantages.leave_one_out(
        torch.tensor([0.0, 2.0, 4.0]), torch.tensor([0, 0, 0])
    ).tolist() == [-3.0, 0.0, 3.0]


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6, -7.7])
def test_equal_rewards_give_exactly_zero(function, reward):
    found = function(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64))
    assert found.tolist() == [0.0] * 7


@pytest.mark.parametrize("function", ALL, ids=lambda f: f.__name__)
def test_permuting_rollouts_permutes_advantages(function):
    rewards, groups = torch.tensor(REWARDS), torch.tensor(GROUPS)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        function(rewards[order], groups[order]), function(rewards, groups)[order], equal_nan=True
    )


def test_leave_one_out_is_centered_times_n_over_n_minus_1():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.zeros(4, dtype=torch.int64)
    centered, left = (
        f(rewards, groups) for f in (advantages.group_centered, advantages.leave_one_out)
    )
    torch.testing.assert_close(left, centered * 4 / 3)


def test_a_batch_of_single_rollouts_has_a_baseline():
    """Rewards 0, 2, 4: mean 2, std 2."""
    rewards, alone = torch.tensor([0.0, 2.0, NAN, 4.0]), torch.arange(4)
    found = advantages.batch_normalized(rewards, alone)
    np.testing.assert_allclose(found.numpy(), [-1.0, 0.0, NAN, 1.0], rtol=1e-7)
    assert advantages.batch_normalized_baseline(rewards, alone).isnan().all()


@pytest.mark.parametrize(
    "function", [advantages.batch_normalized, advantages.batch_normalized_baseline]
)
@pytest.mark.parametrize("rewards", [[], [NAN, NAN], [1.0, NAN], [3.0]])
def test_fewer_than_two_scored_rollouts_have_no_batch_statistics(function, rewards):
    found = function(torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.int64))
    assert found.shape == (len(rewards),) and found.isnan().all()


def test_a_batch_of_one_group_is_that_group():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, NAN, 0.2]), torch.zeros(5, dtype=torch.int64)
    expected = advantages.group_normalized(rewards, groups, 1e-8)
    for function in (advantages.batch_normalized, advantages.batch_normalized_baseline):
        torch.testing.assert_close(function(rewards, groups), expected, equal_nan=True)


def test_with_a_baseline_a_group_of_equal_rewards_is_exactly_zero_among_others():
    """Centred rewards ±1/2 twice, std sqrt(4 · 1/4 / 6) with the three zeros; the group of one does
    not count."""
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 5.0, 6.0, 7.7])
    found = advantages.batch_normalized_baseline(rewards, torch.tensor([0, 0, 0, 1, 1, 2, 2, 3]))
    assert found[:3].tolist() == [0.0] * 3
    assert found[3:7].tolist() == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5)] * 2)
    assert found[7].isnan()


def test_the_size_of_a_reward_counts_over_the_batch_and_not_in_the_group():
    """Two groups, one with spread 1, one with 10: over the batch their advantages keep that
    ratio."""
    rewards, groups = torch.tensor([0.0, 1.0, 0.0, 10.0]), torch.tensor([0, 0, 1, 1])
    scaled = advantages.batch_normalized_baseline(rewards, groups)
    assert (scaled[3] / scaled[1]).item() == pytest.approx(10.0)
    alike = advantages.group_normalized(rewards, groups, 0.0)
    assert (alike[3] / alike[1]).item() == pytest.approx(1.0)


def test_opo_takes_off_the_mean_reward_weighted_by_length():
    """verl's loop: Σ l R / Σ l of the scored ones, in float64."""
    rewards, groups = torch.tensor(REWARDS), torch.tensor(GROUPS)
    lengths = torch.tensor([3, 1, 8, 100, 2, 5, 9, 4, 7, 100, 1, 2, 30])
    expected = []
    for i, group in enumerate(GROUPS):
        peers = [j for j, g in enumerate(GROUPS) if g == group and not rewards[j].isnan()]
        if len(peers) < 2 or rewards[i].isnan():
            expected.append(NAN)
            continue
        products = sum(lengths[j].item() * rewards[j].item() for j in peers)
        expected.append(rewards[i].item() - products / sum(lengths[j].item() for j in peers))
    found = estimators.length_weighted(rewards, groups, lengths=lengths)
    assert found.dtype == torch.float32 and found[-3:].tolist() == [0.0] * 3  # equal rewards
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)
    alike = estimators.length_weighted(rewards, groups, lengths=torch.full((13,), 4))
    torch.testing.assert_close(
        alike, advantages.group_centered(rewards, groups), equal_nan=True, rtol=1e-6, atol=1e-7
    )


def test_zero_variance_looks_at_scored_rewards_only():
    rewards, groups = (
        torch.tensor([1.0, 1.0, NAN, 0.0, 1.0, NAN, 1.0, NAN]),
        torch.tensor([0, 0, 0, 1, 1, 2, 3, 3]),
    )
    assert advantages.zero_variance(rewards, groups).tolist() == [True] * 3 + [False] * 5


def test_the_batchs_deviation_scales_every_group():
    """Lite PPO's equation by plain loops over the scored rewards; TRL's scale_rewards = "batch"."""
    rewards = np.array(REWARDS, np.float32).astype(np.float64)
    scored = [reward for reward in rewards if not math.isnan(reward)]
    mean = sum(scored) / len(scored)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    for epsilon in (1e-4, 0.5):
        found = estimators.batch_scaled(
            torch.tensor(REWARDS), torch.tensor(GROUPS), epsilon=epsilon
        )
        centered = np.array(_expected("group_centered"))
        np.testing.assert_allclose(found.numpy(), centered / (std + epsilon), rtol=1e-6, atol=1e-7)
    assert found[-3:].tolist() == [0.0] * 3  # a group of equal rewards


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

    def normalized(i: int, k: int) -> float:
        peers = [
            parts[j, k]
            for j, group in enumerate(groups)
            if group == groups[i] and not math.isnan(rewards[j]) and not math.isnan(parts[j, k])
        ]
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
        return (parts[i, k] - mean) / (std + 1e-4)

    sums = [NAN] * len(groups)
    for i in (0, 1, 2, 4, 5, 6, 8, 9):  # not the unscored one, nor the group of one
        sums[i] = sum(
            weights[i, k] * normalized(i, k) for k in range(2) if not math.isnan(parts[i, k])
        )
    known = [value for value in sums if not math.isnan(value)]
    mean = sum(known) / len(known)
    assert mean == pytest.approx(0.0, abs=1e-12)
    std = math.sqrt(sum((value - mean) ** 2 for value in known) / (len(known) - 1))
    found = estimators.part_normalized(
        torch.tensor(rewards).float(),
        torch.tensor(groups),
        parts=torch.tensor(parts),
        part_weights=torch.tensor(weights),
    )
    expected = [value / (std + 1e-4) for value in sums]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert found[-2:].tolist() == [0.0, 0.0]  # every part equal
    assert found[0] < -0.1 and found[1] > 0.1  # equal sums of unequal parts


def test_gdpo_of_one_part_and_one_group_is_grpo():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, NAN]), torch.zeros(4, dtype=torch.int64)
    found = estimators.part_normalized(
        rewards, groups, parts=rewards[:, None], part_weights=torch.full((4, 1), 7.0), epsilon=0.0
    )
    expected = advantages.group_normalized(rewards, groups, epsilon=0.0)
    torch.testing.assert_close(found, expected, equal_nan=True)


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
        mean = sum(best.values()) / len(best)
        std = math.sqrt(sum((value - mean) ** 2 for value in best.values()) / len(best))
        for i in members:
            own = [value for subset, value in best.items() if i in subset]
            expected[i] = (sum(own) / len(own) - mean) / (std + 1e-8)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(2))
    found = torch.empty(len(rewards))
    found[order] = estimators.pass_at_k(
        torch.tensor(rewards).float()[order], torch.tensor(groups)[order], k=k
    )
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
    assert found[10:15].tolist() == [0.0] * 5 and found[15].isnan()
    assert k < 4 or found[:5].isnan().all()


@pytest.mark.parametrize("wrong", range(9))
def test_pass_at_k_of_right_and_wrong_answers_is_the_papers_form(wrong):
    n, k = 8, 4
    rewards = torch.tensor([0.0] * wrong + [1.0] * (n - wrong))
    found = estimators.pass_at_k(rewards, torch.zeros(n, dtype=torch.int64), k=k)
    mean = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(mean * (1 - mean))
    if std == 0:  # always or never solved by k
        assert found.tolist() == [0.0] * n
        return
    of_wrong = 1 - math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    expected = [(of_wrong - mean) / std] * wrong + [(1 - mean) / std] * (n - wrong)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)


def test_pass_at_1_is_group_normalized_but_for_the_count():
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.2]), torch.zeros(4, dtype=torch.int64)
    expected = advantages.group_normalized(rewards, groups, 0.0) * math.sqrt(4 / 3)
    torch.testing.assert_close(estimators.pass_at_k(rewards, groups, k=1, epsilon=0.0), expected)


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


def test_equal_weights_leave_the_mean_of_those_that_are_as_long():
    """Of 1 + 2 tokens: the first tokens are compared with one another."""
    found = estimators.optimal_token_baseline(
        torch.tensor([3.0, 0.0, 1.0]),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 0]),
        torch.zeros(3) - 30.0,
        torch.zeros(3),
    )
    assert found.tolist() == pytest.approx([1.0, -1.0, 0.0])


def test_opo_counts_the_tokens_of_scored_rollouts_alone():
    """(1 · 1 + 3 · 0) / (1 + 3) = 1/4; the 100 tokens without a reward weigh nothing."""
    rewards, groups = torch.tensor([1.0, NAN, 0.0]), torch.tensor([0, 0, 0])
    found = estimators.length_weighted(rewards, groups, lengths=torch.tensor([1, 100, 3]))
    assert found.tolist() == pytest.approx([0.75, NAN, -0.25], nan_ok=True)
