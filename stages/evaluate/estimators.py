"""Estimators of an evaluation: the mean with a clustered standard error, unbiased pass@k, and
paired differences.

Samples of one prompt are correlated, so the groups are the independent units: n counts groups,
never samples. Legend: n groups, group g with m_g scored samples s_gi, c_g of them correct.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

_RESAMPLES = 4000
_MOST_AT_ONCE = 2**22  # numbers drawn at a time


class Estimate(NamedTuple):
    """A mean over `n` groups with its standard error, which is None for fewer than two groups."""

    score: float
    stderr: float | None
    n: int


def clustered_mean(groups: Mapping[str, Sequence[float]]) -> Estimate:
    """Return the mean of the groups' means, and its standard error with groups as independent
    units.

        s̄_g = Σ_i s_gi / m_g        score = Σ_g s̄_g / n
        stderr = √( Σ_g (s̄_g − score)² / (n (n − 1)) )

    With one sample a group this is the plain s/√n. With equal m_g it is the clustered standard
    error of Miller 2024, with n (n − 1) in place of n²; with unequal m_g each prompt still counts
    the same here.

    Args:
        groups: Scores by group id; groups without a score are left out by the caller.
    Raises: ValueError if there is no group, or an empty one.
    Reference: E. Miller, Adding Error Bars to Evals, 2024, https://arxiv.org/abs/2411.00640

    >>> clustered_mean({"a": [1.0, 0.0], "b": [1.0, 1.0]})
    Estimate(score=0.75, stderr=0.25, n=2)
    """
    if not groups or not all(groups.values()):
        raise ValueError("an estimate needs at least one group, and a score in each")
    means = list(group_means(groups).values())
    n = len(means)
    score = math.fsum(means) / n
    if n < 2:
        return Estimate(score, None, n)
    squares = math.fsum((mean - score) ** 2 for mean in means)
    return Estimate(score, math.sqrt(squares / (n * (n - 1))), n)


def group_means(groups: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of each group's scores."""
    return {group: math.fsum(scores) / len(scores) for group, scores in groups.items()}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate that at least one of k samples of a prompt is correct.

        pass@k = 1 − C(m − c, k) / C(m, k)        m = samples, c = correct

    k = 1 gives c/m. The obvious 1 − (1 − c/m)^k is biased low; this averages over all subsets of k
    samples.

    Raises: ValueError unless 1 ≤ k ≤ samples and 0 ≤ correct ≤ samples.
    Reference: M. Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1,
    https://arxiv.org/abs/2107.03374

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(
            f"pass@k needs 1 ≤ k ≤ samples and 0 ≤ correct ≤ samples, got k={k}, {correct} of "
            f"{samples}"
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(groups: Mapping[str, Sequence[float]], k: int, threshold: float) -> Estimate:
    """Average the pass@k of each group with `clustered_mean`; a sample is correct if its score is
    at least `threshold`.

    Groups with fewer than k scores are left out, so n says how many took part.

    Raises: ValueError if no group has k scores.

    >>> mean_pass_at_k({"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 0.0], "c": [1.0]}, 2, 1.0)
    Estimate(score=0.25, stderr=0.25, n=2)
    """
    passes = group_passes(groups, k, threshold)
    return clustered_mean({group: [estimate] for group, estimate in passes.items()})


def group_passes(
    groups: Mapping[str, Sequence[float]], k: int, threshold: float
) -> dict[str, float]:
    """Return the pass@k of each group that has k scores."""
    return {
        group: pass_at_k(len(scores), sum(score >= threshold for score in scores), k)
        for group, scores in groups.items()
        if len(scores) >= k
    }


def paired_difference(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Estimate:
    """Return the mean over groups of ours − theirs, with the standard error of that difference.

        d_g = a_g − b_g        score = Σ_g d_g / n
        stderr = √( Σ_g (d_g − score)² / (n (n − 1)) )

    a_g and b_g are two policies' results on the same prompt: the mean of its samples, or its
    pass@k. A prompt's difficulty for both cancels, so the error is smaller than √(stderr_a² +
    stderr_b²), which is for two sets of prompts. Groups that only one of them has are left out.

    Raises: ValueError if no group is in both.
    Reference: E. Miller, Adding Error Bars to Evals, 2024, section 4.2,
    https://arxiv.org/abs/2411.00640

    >>> paired_difference({"a": 1.0, "b": 0.5, "c": 0.0}, {"a": 0.5, "b": 0.0, "d": 1.0})
    Estimate(score=0.5, stderr=0.0, n=2)
    """
    return clustered_mean(
        {group: [ours[group] - theirs[group]] for group in ours if group in theirs}
    )


def lower_bound(estimate: Estimate, confidence: float) -> float | None:
    """Return the one-sided lower confidence bound of an estimate, score − z · stderr; None without
    a standard error.

    z is the normal quantile of `confidence`: 0.5 gives the score itself, 0.95 gives score − 1.645 ·
    stderr. With fewer than about 30 groups the normal quantile is too small, so the bound is too
    high.

    >>> lower_bound(Estimate(0.25, 0.125, 40), 0.5)
    0.25
    """
    if estimate.stderr is None:
        return None
    return estimate.score - NormalDist().inv_cdf(confidence) * estimate.stderr


def bootstrap_interval(
    differences: Sequence[float], confidence: float, seed: int = 0
) -> tuple[float, float] | None:
    """Return the percentile bootstrap interval of the mean of `differences`; None for fewer than
    two.

    Each resample draws n prompts with replacement; the interval's ends are the (1 − confidence) / 2
    and (1 + confidence) / 2 quantiles of the means. It assumes no normal distribution but, like any
    interval, is too short with few prompts. The same differences and seed give the same interval.

    Args:
        differences: [n], one for each prompt.
        confidence: Between 0 and 1.
        seed: Seed of the resamples.
    Reference: B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.

    >>> bootstrap_interval([0.5, 0.5, 0.5], 0.95)
    (0.5, 0.5)
    """
    n = len(differences)
    if n < 2:
        return None
    drawn = np.random.RandomState(seed)
    values = np.asarray(differences, np.float64)
    means: list[np.ndarray] = []
    rows = max(1, _MOST_AT_ONCE // n)
    for start in range(0, _RESAMPLES, rows):
        size = (min(rows, _RESAMPLES - start), n)
        means.append(values[drawn.randint(n, size=size)].mean(axis=1))
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def differences(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    passes_at: Sequence[int],
    thresholds: tuple[float, float],
    confidence: float | None = None,
) -> dict[str, Any]:
    """Return ours − theirs as plain numbers: `score`, and `pass@k` with one entry for each k at
    which both have a prompt with k scores.

    Args:
        ours: Scores by prompt.
        theirs: Scores by prompt, under the same names.
        passes_at: The numbers k.
        thresholds: Smallest score of a correct sample of ours, and of theirs.
        confidence: If given, each entry has the bootstrap interval of this confidence.
    Raises: ValueError if no prompt is in both.
    """

    def difference(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, Any]:
        numbers = paired_difference(a, b)._asdict()
        if confidence is not None:
            changes = [a[name] - b[name] for name in a if name in b]
            numbers["interval"] = bootstrap_interval(changes, confidence)
        return numbers

    passes = {}
    for k in passes_at:
        our_passes, their_passes = (
            group_passes(scores, k, threshold)
            for scores, threshold in zip((ours, theirs), thresholds, strict=True)
        )
        if our_passes.keys() & their_passes.keys():
            passes[str(k)] = difference(our_passes, their_passes)
    return {"score": difference(group_means(ours), group_means(theirs)), "pass@k": passes}
