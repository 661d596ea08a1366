"""The statistics against mpmath's integrals, exhaustive counts, and simulated experiments whose truth
is known."""

import doctest
import itertools
import math

import mpmath
import numpy as np
import pytest

from quiver.stages.evaluate import statistics
from quiver.stages.evaluate.statistics import (
    effective_rows,
    holm,
    paired_interval,
    paired_p_value,
    pareto_k,
    score_interval,
    self_normalized,
    student_cdf,
    student_quantile,
    unpaired_difference,
)

EXPERIMENTS = 2000


def test_the_examples_in_the_docstrings():
    counts = doctest.testmod(statistics)
    assert counts.failed == 0 and counts.attempted >= 8


def test_students_distribution_is_the_incomplete_beta_function():
    for degrees, t in itertools.product((1, 2, 3, 4, 5, 11, 30, 399, 1001), (0.0, 0.1, 2.3, 9.0)):
        square = degrees / (degrees + mpmath.mpf(t) ** 2)
        tail = mpmath.betainc(mpmath.mpf(degrees) / 2, 0.5, 0, square, regularized=True) / 2
        assert student_cdf(t, degrees) == pytest.approx(float(1 - tail), abs=1e-12)
        assert student_cdf(-t, degrees) == pytest.approx(float(tail), abs=1e-12)
    for probability in (0.01, 0.5, 0.9, 0.999):
        for degrees in (1, 2, 7, 5000):
            t = student_quantile(probability, degrees)
            assert student_cdf(t, degrees) == pytest.approx(probability, abs=1e-12)


# -- intervals


def prompts_of(draw, n, *, graded):
    """Probabilities of n prompts, and their mean over all prompts."""
    mean = draw.uniform(0.1, 0.9)
    alike = draw.choice([4, 8, 50] if graded else [1, 4, 50])
    return np.clip(draw.beta(mean * alike, (1 - mean) * alike, size=n), 1e-6, 1 - 1e-6), mean


def scores_of(draw, means, samples, *, graded):
    shape = (len(means), samples)
    if graded:
        return draw.beta(means[:, None] * 4, (1 - means[:, None]) * 4, shape)
    return draw.binomial(1, means[:, None], shape).astype(float)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("n", [6, 12, 400])
def test_the_interval_of_a_score_covers_it_as_often_as_it_says(n, graded):
    """With 1, 4 or 8 samples of a prompt; prompts that are alike, or very different."""
    draw = np.random.default_rng(n)
    covered = 0
    for number in range(EXPERIMENTS):
        means, truth = prompts_of(draw, n, graded=graded)
        scores = scores_of(draw, means, (1, 4, 8)[number % 3], graded=graded)
        by_prompt = scores.mean(axis=1)
        stderr = by_prompt.std(ddof=1) / math.sqrt(n)
        low, high = score_interval(by_prompt.mean(), stderr, n, scores.ravel(), scores.size)
        assert 0 <= low <= by_prompt.mean() <= high <= 1
        covered += low <= truth <= high
    assert 0.93 <= covered / EXPERIMENTS <= 0.97


def test_one_row_a_prompt_that_is_0_or_1_has_wilsons_own_interval():
    """Wilson's interval is all p with |p̂ − p| ≤ z √(p (1 − p) / n)."""
    for right, n in ((0, 6), (3, 6), (11, 12), (37, 400), (400, 400)):
        scores = [1.0] * right + [0.0] * (n - right)
        stderr = np.std(scores, ddof=1) / math.sqrt(n)
        grid = np.linspace(0, 1, 200_001)
        inside = grid[abs(right / n - grid) <= 1.959964 * np.sqrt(grid * (1 - grid) / n) + 1e-12]
        found = score_interval(right / n, stderr, n, scores, n)
        assert found == pytest.approx((inside[0], inside[-1]), abs=2e-5)


def test_scores_of_any_size_have_students_interval_and_one_prompt_has_none():
    scores = [-1.0, 2.0, 5.0, 2.0]
    stderr = np.std(scores, ddof=1) / 2
    expected = (2 - 3.182446 * stderr, 2 + 3.182446 * stderr)
    assert score_interval(2.0, stderr, 4, scores, 4) == pytest.approx(expected, abs=1e-5)
    assert score_interval(0.5, None, 1, [0.5], 1) is None
    assert score_interval(0.5, 0.0, 3, [0.5] * 3, 3) == (0.5, 0.5)


@pytest.mark.parametrize("graded", [False, True])
@pytest.mark.parametrize("n", [6, 12, 400])
def test_the_interval_of_a_difference_covers_it_as_often_as_it_says(n, graded):
    """A policy that is better on each prompt by another amount; 4 or 8 samples of a prompt."""
    draw = np.random.default_rng(n)
    covered = 0
    for number in range(EXPERIMENTS):
        samples = (4, 8)[number % 2]
        before, mean = prompts_of(draw, n, graded=graded)
        gain = draw.uniform(0, 0.5)
        after = before + draw.beta(4, 4, size=n) * 2 * gain * (1 - before)
        after = np.minimum(after, 1 - 1e-6)
        truth = gain * (1 - mean)
        sides = [scores_of(draw, means, samples, graded=graded) for means in (after, before)]
        changes = sides[0].mean(axis=1) - sides[1].mean(axis=1)
        low, high = paired_interval(changes, 0.0 if graded else 1 / samples, 1.0)
        covered += low <= truth <= high
    assert 0.93 <= covered / EXPERIMENTS <= 0.98


def test_a_difference_of_0_and_1_is_never_certain():
    """And is found, if there is one, as often as chance allows if there is none."""
    low, high = paired_interval([0.0] * 400, 1.0, 1.0)
    assert -0.01 < low < -0.003 and 0.003 < high < 0.01
    draw = np.random.default_rng(0)
    sides = draw.binomial(1, 0.5, (2, EXPERIMENTS, 30))
    p_values = [paired_p_value(list(row), 1.0) for row in sides[0] - sides[1]]
    assert 0.02 < np.mean(np.array(p_values) <= 0.05) < 0.06


def test_the_p_value_belongs_to_the_interval():
    """It is α where the interval of confidence 1 − α ends at 0."""
    changes = [0.3, 0.1, -0.2, 0.4, 0.25]
    for step in (0.0, 0.5):
        p = paired_p_value(changes, step)
        low, high = paired_interval(changes, step, confidence=1 - p)
        assert low == pytest.approx(0, abs=1e-9) and high > 0
    assert paired_p_value([0.1] * 6) == 1 / 32, "of the 64 patterns of signs, two are as extreme"
    assert paired_p_value([0.0, 0.0]) == paired_p_value([1.0]) == 1
    assert paired_interval([1.0]) is None
    tiny = [paired_p_value([1.0, 1.0 + 10.0**-power, 1.0] * 4) for power in range(1, 9)]
    assert min(tiny) >= 0 and tiny == sorted(tiny, reverse=True)


def test_the_interval_of_a_difference_over_other_prompts_is_never_too_narrow():
    """Of other size and variance; without a difference, p is small as rarely as chance allows."""
    draw = np.random.default_rng(9)
    for n_before, n_after, ratio in ((8, 8, 1), (12, 60, 3), (60, 12, 3), (400, 400, 0.5)):
        before = draw.normal(size=(EXPERIMENTS, n_before))
        after = 0.3 + ratio * draw.normal(size=(EXPERIMENTS, n_after))
        pairs = list(zip(before, after, strict=True))
        intervals = [unpaired_difference(*pair)[1] for pair in pairs]
        covered = np.mean([low <= 0.3 <= high for low, high in intervals])
        assert 0.94 <= covered <= 0.985
        p_values = [unpaired_difference(early + 0.3, late)[2] for early, late in pairs]
        assert np.mean(np.array(p_values) <= 0.05) == pytest.approx(1 - covered, abs=1e-3)
    same = np.full(3, 2.0)
    assert unpaired_difference(same, same + 1) == (1.0, None, 1.0)
    assert unpaired_difference(np.array([1.0]), before[0])[1:] == (None, 1.0)


def test_holms_correction_is_the_closed_test_of_bonferroni():
    """A p-value is the largest over all sets that contain it of the set's smallest times its size."""
    draw = np.random.default_rng(1)
    for count in (1, 2, 5, 7):
        p = draw.uniform(size=count) ** 3
        expected = []
        for index in range(count):
            sets = [
                members
                for size in range(1, count + 1)
                for members in itertools.combinations(range(count), size)
                if index in members
            ]
            largest = max(min(len(members) * min(p[list(members)]), 1) for members in sets)
            expected.append(largest)
        assert holm(list(p)) == pytest.approx(expected)


# -- importance sampling


def test_rows_weighted_by_exact_probabilities_give_the_expected_score():
    """Every sequence of three tokens once, weighted by its own probability under the new policy."""
    draw = np.random.default_rng(2)
    logits = draw.normal(size=(3, 4))
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    sequences = list(itertools.product(range(4), repeat=3))
    each = [sum(log_probs[t, token] for t, token in enumerate(row)) for row in sequences]
    scores = draw.uniform(size=len(sequences))
    expected = sum(math.exp(x) * score for x, score in zip(each, scores, strict=True))
    prompts = np.zeros(len(sequences), int)
    found, _ = self_normalized(np.array(each)[:, None] + 99, scores[:, None], prompts)
    assert found == pytest.approx(expected, abs=1e-12)


def test_each_prompt_counts_the_same_and_the_error_is_that_of_their_means():
    """With equal weights: the mean of the prompts' means, and its clustered standard error."""
    groups = {0: [1.0, 0.0], 1: [1.0], 2: [0.0, 0.25, 0.5, 0.25]}
    prompts = np.array([name for name, scores in groups.items() for _ in scores])
    scores = np.array([score for of_group in groups.values() for score in of_group])
    found, stderr = self_normalized(np.full((7, 1), -3.0), scores[:, None], prompts)
    means = [np.mean(of_group) for of_group in groups.values()]
    assert found == pytest.approx(np.mean(means))
    assert stderr == pytest.approx(np.std(means, ddof=1) / math.sqrt(3))


def test_a_turn_counts_by_the_ratio_up_to_it():
    """Two turns of one token each; a row may end after the first, and keeps its ratio."""
    draw = np.random.default_rng(3)
    first, second = draw.dirichlet([1, 1]), draw.dirichlet([1, 1, 1])
    gains, later = draw.uniform(size=2), draw.uniform(size=3)
    rows = [(0, None), *((1, token) for token in range(3))]  # token 0 ends the episode
    log_weights, scores = [], []
    for token, then in rows:
        whole = first[token] * (1 if then is None else second[then])
        # every row stands for itself: it counts by its probability under the new policy
        log_weights.append([math.log(whole)] * 2)
        scores.append([gains[token], 0 if then is None else later[then]])
    expected = first @ gains + first[1] * (second @ later)
    found, _ = self_normalized(np.array(log_weights), np.array(scores), np.zeros(4, int))
    assert found == pytest.approx(expected)
    # with rows of the uniform policy, a turn's own ratio is enough, and less noisy
    tokens = draw.integers(2, size=60_000), draw.integers(3, size=60_000)
    ratio = np.log(first[tokens[0]] * 2)
    longer = np.where(tokens[0] == 1, np.log(second[tokens[1]] * 3), 0)
    earned = np.stack([gains[tokens[0]], np.where(tokens[0] == 1, later[tokens[1]], 0)], axis=1)
    weights = np.stack([ratio, ratio + longer], axis=1)
    found, stderr = self_normalized(weights, earned, np.arange(60_000))
    assert found == pytest.approx(expected, abs=4 * stderr) and stderr < 0.01


def test_the_shape_of_a_pareto_tail_is_found():
    """(1 − u)^−k has a Pareto tail of shape k; bounded weights have a negative one."""
    uniform = np.random.default_rng(4).uniform(size=500_000)
    for k in (0.3, 0.6, 1.0):
        assert pareto_k(-k * np.log(uniform)) == pytest.approx(k, abs=0.08)
    assert pareto_k(np.log(uniform)) < -0.5
    assert pareto_k(np.zeros(500)) == -math.inf
    assert pareto_k(np.array([0.0] * 499 + [5.0])) == math.inf
    # few rows: drawn towards 0.5 by ten rows' worth
    small = [
        pareto_k(-0.9 * np.log(uniform[start : start + 100])) for start in range(0, 10**4, 100)
    ]
    assert 0.55 < np.mean(small) < 0.9


def test_effective_rows_of_log_normal_weights():
    """E[w]² / E[w²] of exp(N(0, σ²)) is exp(−σ²)."""
    draw = np.random.default_rng(5).normal(scale=0.5, size=200_000)
    assert effective_rows(draw) / 200_000 == pytest.approx(math.exp(-0.25), rel=0.02)
