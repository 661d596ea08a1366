"""Estimators against independent computations: every subset counted, every formula written out again."""

import doctest
import itertools
import math
import random
import statistics

import pytest

from stages.evaluate import estimators
from stages.evaluate.estimators import clustered_mean, mean_pass_at_k, pass_at_k


def test_the_examples_in_the_docstrings():
    found = doctest.testmod(estimators)
    assert (found.failed, found.attempted) == (0, 3)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(samples):
    for correct in range(samples + 1):
        marks = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(marks, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased():
    chance, k, samples = 0.3, 3, 6
    expected = 1 - (1 - chance) ** k
    binomial = [math.comb(samples, c) * chance**c * (1 - chance) ** (samples - c) for c in range(samples + 1)]
    mean = sum(weight * pass_at_k(samples, c, k) for c, weight in enumerate(binomial))
    assert mean == pytest.approx(expected, abs=1e-12)
    naive = sum(weight * (1 - (1 - c / samples) ** k) for c, weight in enumerate(binomial))
    assert naive < expected - 0.01


def test_pass_at_k_with_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5)


@pytest.mark.parametrize("samples, correct, k", [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(samples, correct, k):
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(samples, correct, k)


def test_one_sample_a_group_is_the_plain_standard_error():
    values = [0.0, 1.0, 0.5, 1.0, 0.25]
    found = clustered_mean({str(n): [value] for n, value in enumerate(values)})
    assert found.score == pytest.approx(statistics.mean(values))
    assert found.stderr == pytest.approx(statistics.stdev(values) / math.sqrt(5))
    assert found.n == 5


def test_copies_of_a_sample_bring_no_certainty():
    once = clustered_mean({"a": [1.0], "b": [0.0], "c": [1.0]})
    assert clustered_mean({"a": [1.0] * 8, "b": [0.0] * 8, "c": [1.0] * 8}) == once


def test_the_standard_error_is_that_of_repeated_evaluations():
    random.seed(0)
    chances = [random.random() for _ in range(400)]
    scores, errors = [], []
    for _ in range(300):
        drawn = random.choices(chances, k=30)
        groups = {str(n): [float(random.random() < chance) for _ in range(4)] for n, chance in enumerate(drawn)}
        estimate = clustered_mean(groups)
        scores.append(estimate.score)
        errors.append(estimate.stderr)
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(scores), rel=0.1)


def test_one_group_has_no_standard_error():
    assert clustered_mean({"a": [1.0, 0.0]}) == (0.5, None, 1)


def test_nothing_can_not_be_estimated():
    for groups in ({}, {"a": []}):
        with pytest.raises(ValueError, match="at least one group"):
            clustered_mean(groups)


def test_groups_with_too_few_samples_are_left_out_of_pass_at_k():
    groups = {"a": [1.0, 0.0, 0.0], "b": [1.0], "c": [0.4, 0.6, 0.2, 0.1]}
    assert mean_pass_at_k(groups, 2, threshold=1.0) == (pytest.approx((2 / 3 + 0) / 2), pytest.approx(1 / 3), 2)
    assert mean_pass_at_k(groups, 1, threshold=0.5).score == pytest.approx((1 / 3 + 1 + 1 / 4) / 3)
