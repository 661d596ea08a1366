"""Statistics within groups against exact enumeration of small policies, least squares with a column
for each group, and simulated experiments whose truth is known."""

import itertools
import math

import numpy as np
import pytest

from quiver.stages.evaluate.statistics import paired_interval
from quiver.stages.evaluate.within_groups import (
    centered,
    correlation,
    effective_samples,
    has_contrast,
    num_known,
    opposed,
    pull,
    spread,
    tilted,
    variance_shares,
)

NAN = math.nan


def optimum(chances, rewards, beta):
    """π* ∝ π exp(r / β), normalised by hand."""
    raised = [chance * math.exp(r / beta) for chance, r in zip(chances, rewards, strict=True)]
    return np.array(raised) / math.fsum(raised)


# -- what a reward pulls to


@pytest.mark.parametrize("beta", [0.05, 0.7, 40.0])
def test_a_group_in_its_exact_proportions_gives_the_exact_expectations_of_the_optimum(beta):
    """Two policies over three answers, sampled as often as they are likely."""
    counts = np.array([[1, 2, 5], [10, 4, 2]])
    rewards = np.array([[0.1, -0.6, 0.4], [2.0, 2.5, 1.0]])
    measures = np.array([[12.0, 300.0, 7.0], [1.0, 0.0, 5.0]])
    groups = np.repeat([0, 1], counts.sum(axis=1))
    r, f = (
        np.concatenate([np.repeat(*pair) for pair in zip(numbers, counts, strict=True)])
        for numbers in (rewards, measures)
    )
    order = np.random.default_rng(0).permutation(len(r))
    found = pull(r[order], f[order], groups[order], beta)
    weights = tilted(r[order], groups[order], beta)
    for group, (count, r_of, f_of) in enumerate(zip(counts, rewards, measures, strict=True)):
        chances = count / count.sum()
        best = optimum(chances, r_of, beta)
        assert found.now[group] == pytest.approx(chances @ f_of)
        assert found.change[group] == pytest.approx(best @ f_of - chances @ f_of)
        covariance = chances @ (f_of * r_of) - (chances @ f_of) * (chances @ r_of)
        unbiased = covariance * count.sum() / (count.sum() - 1)
        assert found.first_order[group] == pytest.approx(unbiased / beta)
        each = best / count  # the weight of each copy of an answer
        expected = 1 / (count @ each**2)
        assert effective_samples(weights, groups[order])[group] == pytest.approx(expected)


def test_the_optimum_has_the_highest_reward_less_its_divergence():
    """No other policy over the saved answers has a higher E[r] − β KL."""
    draw = np.random.default_rng(1)
    r, beta = draw.normal(size=6), 0.8

    def objective(weights):
        return weights @ r - beta * weights @ np.log(6 * weights)

    best = objective(tilted(r, np.zeros(6, int), beta))
    assert best == pytest.approx(beta * math.log(np.exp(r / beta).mean()))
    assert all(objective(draw.dirichlet(np.ones(6))) < best for _ in range(200))


def test_a_small_step_is_the_first_order_and_a_large_one_the_best_answer():
    draw = np.random.default_rng(2)
    r, f, groups = draw.normal(size=(2, 40))[0], draw.normal(size=40), np.repeat(np.arange(5), 8)
    small, large = pull(r, f, groups, 1e6), pull(r, f, groups, 1e-6)
    assert small.change * 8 / 7 == pytest.approx(small.first_order, rel=1e-4)
    best = f.reshape(5, 8)[np.arange(5), r.reshape(5, 8).argmax(axis=1)]
    assert large.now + large.change == pytest.approx(best)


def test_a_measure_that_is_the_same_for_all_answers_changes_by_nothing_at_all():
    """Rounding would make it certain that it changes a little."""
    r, groups = np.random.default_rng(8).normal(size=700), np.repeat(np.arange(100), 7)
    found = pull(r, np.full(700, 1.0), groups, 0.3)
    assert not found.change.any() and not found.first_order.any()
    assert not centered(np.full(700, 0.1), groups).any(), "the mean of seven 0.1 is not 0.1"


def test_what_is_not_known_is_left_out():
    """A row without reward, one without the measure, and groups with neither or one of them."""
    groups = np.array([0, 0, 0, 0, 1, 1, 2, 3])
    r = np.array([1.0, 0.0, NAN, 5.0, NAN, NAN, 2.0, 1.0])
    f = np.array([1.0, 2.0, 7.0, NAN, 1.0, 2.0, 3.0, NAN])
    found = pull(r, f, groups, 1.0)
    weight = math.e / (1 + math.e)
    assert found.now.tolist() == [1.5, 3.0]
    assert found.change == pytest.approx([weight + 2 * (1 - weight) - 1.5, 0.0])
    assert found.first_order == pytest.approx([-0.5, 0.0])
    assert num_known(r, groups).tolist() == [3, 0, 1, 1]
    assert has_contrast(r, groups).tolist() == [True, False, False, False]
    assert tilted(r, groups, 1.0)[2:6] == pytest.approx(
        [0, 1 / (1 + math.exp(-4) + math.exp(-5)), 0, 0]
    )
    assert centered(r, groups).tolist() == [-1, -2, 0, 3, 0, 0, 0, 0]
    assert spread(r, groups) == pytest.approx(np.std([1, 0, 5], ddof=1))
    assert spread(np.ones(8), groups) == 0


def test_opposite_advantages_are_found_as_row_by_row():
    draw = np.random.default_rng(3)
    groups = draw.integers(0, 9, 60)
    a, b = draw.integers(0, 3, (2, 60)).astype(float)
    a[draw.integers(0, 60, 8)] = NAN
    expected = np.zeros(60)
    for row in range(60):
        both = [i for i in range(60) if groups[i] == groups[row] and a[i] == a[i]]
        if a[row] == a[row]:
            product = (a[row] - np.mean(a[both])) * (b[row] - np.mean(b[both]))
            expected[row] = max(0, -product) if product < -1e-9 else 0
    assert expected.any() and opposed(a, b, groups) == pytest.approx(expected)
    thirds = np.array([0.1, 0.2, 0.3], np.float32).astype(
        float
    )  # its middle is the mean but for rounding
    assert not opposed(thirds, -np.array([0.3, 0.1, 0.1]), np.zeros(3, int))[1]


def samplers(draw, num_types):
    """Policies over four answers, with rewards and a measure that goes along with them."""
    chances = draw.dirichlet(np.ones(4), num_types)
    r = draw.integers(0, 4, (num_types, 4)) / 3.0
    return chances, r, r + draw.normal(size=(num_types, 4))


def test_intervals_over_prompts_cover_the_truth_as_often_as_they_say():
    """40 prompts of a population of 60 kinds, with 6 answers each. The first order is that of the
    policies; the tilted mean that of groups of 6, by enumerating all 84 counts of 4 answers."""
    draw = np.random.default_rng(4)
    num_types, m, beta = 60, 6, 0.4
    chances, r, f = samplers(draw, num_types)
    best = np.array([optimum(*pair, beta) for pair in zip(chances, r, strict=True)])
    whole = ((best - chances) * f).sum(axis=1)
    covariance = (chances * r * f).sum(1) - (chances * r).sum(1) * (chances * f).sum(1)
    of_groups = np.zeros(num_types)
    for counts in itertools.product(range(m + 1), repeat=4):
        if sum(counts) == m:
            ways = math.factorial(m) / math.prod(map(math.factorial, counts))
            raised = np.array(counts) * np.exp(r / beta)
            change = (raised * f).sum(1) / raised.sum(1) - f @ (np.array(counts) / m)
            of_groups += ways * (chances ** np.array(counts)).prod(1) * change
    covered = np.zeros(2)
    for _ in range(1000):
        kinds = draw.integers(num_types, size=40)
        answers = np.array([draw.choice(4, m, p=chances[kind]) for kind in kinds])
        rows = kinds[:, None], answers
        groups = np.repeat(np.arange(40), m)
        found = pull(r[rows].ravel(), f[rows].ravel(), groups, beta)
        truths = (of_groups.mean(), covariance.mean() / beta)
        for place, changes in enumerate(found[1:]):
            low, high = paired_interval(changes)
            covered[place] += low <= truths[place] <= high
    assert np.all(np.abs(covered / 1000 - 0.95) <= 0.02), covered
    # few answers see less of the optimum, as the docs say
    assert of_groups.mean() / whole.mean() == pytest.approx(0.86, abs=0.005)


def test_the_interval_of_a_change_is_that_of_a_bootstrap_over_prompts():
    draw = np.random.default_rng(5)
    chances, r, f = samplers(draw, 80)
    answers = np.array([draw.choice(4, 8, p=p) for p in chances])
    rows = np.arange(80)[:, None], answers
    found = pull(r[rows].ravel(), f[rows].ravel(), np.repeat(np.arange(80), 8), 0.4)
    changes = found.change
    means = changes[draw.integers(80, size=(20_000, 80))].mean(axis=1)
    low, high = paired_interval(changes)
    assert np.quantile(means, [0.025, 0.975]) == pytest.approx([low, high], abs=0.1 * (high - low))


# -- what a reward goes along with


def by_least_squares(first, second, groups, given=None):
    """The correlation of the residuals of a regression on a column for each group, and `given`."""
    design = np.eye(groups.max() + 1)[groups]
    if given is not None:
        design = np.column_stack([design, given])
    x, y = (
        column - design @ np.linalg.lstsq(design, column, rcond=None)[0]
        for column in (first, second)
    )
    return np.corrcoef(x, y)[0, 1]


def test_correlations_within_groups_are_those_of_the_residuals():
    draw = np.random.default_rng(6)
    groups = draw.integers(0, 12, 150)
    difficulty = 5 * draw.normal(size=12)[groups]
    quality = draw.normal(size=150)
    length = draw.normal(size=150) + quality + difficulty
    reward = quality + 0.5 * length - difficulty + draw.normal(size=150)
    found = correlation(reward, length, groups)
    assert found == pytest.approx(by_least_squares(reward, length, groups))
    found = correlation(reward, length, groups, quality)
    assert found == pytest.approx(by_least_squares(reward, length, groups, quality))
    some = draw.random(150) < 0.8
    holes = np.where(some, reward, NAN)
    left = (reward[some], length[some], groups[some], quality[some])
    assert correlation(holes, length, groups, quality) == pytest.approx(by_least_squares(*left))


def test_a_measure_that_does_not_vary_has_no_correlation():
    groups = np.array([0, 0, 1, 1])
    x = np.array([1.0, 2.0, 5.0, 3.0])
    assert correlation(x, np.array([7.0, 7.0, 9.0, 9.0]), groups) is None
    assert correlation(x, x, groups) == pytest.approx(1)
    assert correlation(x, np.array([0.1, 0.3, 0.2, 0.5]), groups, 0.7 * x) is None, "all explained"
    assert correlation(np.full(4, NAN), x, groups) is None
    assert correlation(np.full(6, 0.1), np.arange(6.0), np.zeros(6, int)) is None


def test_shares_of_variance_add_up_and_need_no_weights():
    """A reward that is a weighted sum, with one part missing in some rows."""
    draw = np.random.default_rng(7)
    groups = np.repeat(np.arange(30), 8)
    parts = draw.normal(size=(3, 240)) + draw.normal(size=30)[groups]
    parts[1] += parts[0]
    parts[2, ::7] = NAN
    weights = np.array([1.0, -0.4, 0.2])
    terms = weights[:, None] * np.nan_to_num(parts)
    reward = terms.sum(axis=0)
    centred = [
        term - np.array([term[groups == g].mean() for g in groups]) for term in [*terms, reward]
    ]
    expected = [term @ centred[3] / (centred[3] @ centred[3]) for term in centred[:3]]
    found = variance_shares(reward, list(parts), groups)
    assert found == pytest.approx(expected) and sum(found) == pytest.approx(1) and found[1] < 0
    clipped = np.minimum(reward, 0.0)
    assert 0 < sum(variance_shares(clipped, list(parts), groups)) < 1
    assert variance_shares(np.ones(240), list(parts), groups) == [0, 0, 0]


def test_a_part_in_large_units_takes_nothing_from_the_others():
    """Right or wrong, less 1e-5 for each of some 20,000 characters."""
    draw = np.random.default_rng(9)
    groups = np.repeat(np.arange(40), 8)
    right = (draw.random(320) < 0.5).astype(float)
    length = 2e4 * draw.normal(size=320)
    terms = [centered(term, groups) for term in (right, -1e-5 * length)]
    total = sum(terms)
    expected = [term @ total / (total @ total) for term in terms]
    found = variance_shares(right - 1e-5 * length, [right, length, np.full(320, 0.1)], groups)
    assert found == pytest.approx([*expected, 0]) and found[0] > 0.5
