"""Estimators against independent computations: every subset counted, every formula written out
again."""

import doctest
import itertools
import math
import statistics

import numpy as np
import pytest

from quiver.stages.evaluate import estimators
from quiver.stages.evaluate.estimators import (
    Estimate,
    clustered_mean,
    differences,
    group_passes,
    lower_bound,
    pass_at_k,
)


def test_the_examples_in_the_docstrings():
    counts = doctest.testmod(estimators)
    assert (counts.failed, counts.attempted) == (0, 3)


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_counts_the_subsets_with_a_correct_sample(samples):
    for correct in range(samples + 1):
        marks = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(itertools.combinations(marks, k))
            assert pass_at_k(samples, correct, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets), abs=1e-15
            )


def test_one_sample_a_group_is_the_plain_standard_error():
    """Copies of a sample bring no certainty, and one group has no error."""
    values = [0.0, 1.0, 0.5, 1.0, 0.25]
    error = statistics.stdev(values) / math.sqrt(5)
    expected = (pytest.approx(statistics.mean(values)), pytest.approx(error), 5)
    for copies in (1, 8):
        assert clustered_mean({str(n): [v] * copies for n, v in enumerate(values)}) == expected
    assert clustered_mean({"a": [1.0, 0.0]}) == (0.5, None, 1)


def test_groups_with_too_few_samples_are_left_out_of_pass_at_k():
    groups = {"a": [1.0, 0.0, 0.0], "b": [1.0], "c": [0.4, 0.6, 0.2, 0.1]}
    assert group_passes(groups, 2, threshold=1.0) == {"a": pytest.approx(2 / 3), "c": 0}
    expected = {"a": pytest.approx(1 / 3), "b": 1, "c": 1 / 4}
    assert group_passes(groups, 1, threshold=0.5) == expected


def test_a_paired_difference_is_the_one_sample_t_test_of_the_differences():
    """Two unpaired means have a larger error."""
    draw = np.random.default_rng(3)
    hard = draw.normal(size=60)
    sides = [hard + draw.normal(scale=0.3, size=60) + shift for shift in (0.1, 0.0)]
    ours, theirs = ({str(n): [float(x)] for n, x in enumerate(side)} for side in sides)
    difference = differences(ours, theirs, (), (1.0, 1.0))["score"]
    changes = sides[0] - sides[1]
    error = changes.std(ddof=1) / np.sqrt(60)
    assert difference["score"] == pytest.approx(changes.mean())
    assert difference["stderr"] == pytest.approx(error)
    assert difference["n"] == 60
    unpaired = [clustered_mean(side).stderr for side in (ours, theirs)]
    assert difference["stderr"] < np.hypot(*unpaired) / 2


def test_the_lower_bound_is_a_quantile_of_students_distribution():
    """Quantiles from tables of the t-distribution."""
    for n, confidence, t in ((50, 0.5, 0.0), (50, 0.975, 2.00958), (6, 0.95, 2.01505)):
        bound = lower_bound(Estimate(0.5, 0.1, n), confidence)
        assert bound == pytest.approx(0.5 - t * 0.1, abs=1e-6)
    assert lower_bound(Estimate(0.5, None, 1), 0.5) is None


def test_prompts_that_only_one_has_are_no_part_of_a_difference():
    ours = {"a": [1.0], "b": [0.0], "c": [9.0]}
    theirs = {"b": [1.0], "a": [0.5], "d": [9.0]}
    difference = differences(ours, theirs, (), (1.0, 1.0))["score"]
    assert [difference[name] for name in ("score", "stderr", "n")] == [-0.25, 0.75, 2]
