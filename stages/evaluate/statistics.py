"""Intervals, tests and importance sampling for scores that are clustered by prompt.

The prompts are the independent units, whether 6 or 400. So errors come from the prompts' means,
and their quantiles are Student's. Legend: n prompts, N rows, at most T turns in a row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
Interval = tuple[float, float]


def student_cdf(t: float, degrees: int) -> float:
    """Return the probability that Student's t with `degrees` of freedom is at most `t`.

        θ = arctan(t / √ν)        P = (1 + A) / 2
        A = sin θ · Σ_k cos²ᵏθ · Π_{i ≤ k} (2i − 1) / 2i                            ν even
        A = 2/π · (θ + sin θ cos θ · Σ_k cos²ᵏθ · Π_{i ≤ k} 2i / (2i + 1))          ν odd

    Reference: M. Abramowitz and I. Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.

    >>> student_cdf(1.0, 1), round(student_cdf(2.0, 2), 6)
    (0.75, 0.908248)
    """
    odd = degrees % 2
    angle = math.atan(t / math.sqrt(degrees))
    i = np.arange(1, (degrees - odd) // 2)
    factors = (2 * i - 1 + odd) / (2 * i + odd) * math.cos(angle) ** 2
    series = math.sin(angle) * (1 + float(np.cumprod(factors).sum()))
    if not odd:
        return (1 + series) / 2
    rest = series * math.cos(angle) if degrees > 1 else 0.0
    return 0.5 + (angle + rest) / math.pi


@cache
def student_quantile(probability: float, degrees: int) -> float:
    """Return the t that Student's distribution does not exceed with this `probability`.

    >>> round(student_quantile(0.975, 5), 4), round(student_quantile(0.05, 1), 4)
    (2.5706, -6.3138)
    """
    if probability < 0.5:
        return -student_quantile(1 - probability, degrees)
    low, high = 0.0, 1.0
    while student_cdf(high, degrees) < probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if student_cdf(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return high


# -- scores


def score_interval(
    score: float,
    stderr: float | None,
    n: int,
    scores: Sequence[float] | np.ndarray,
    rows: float,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return the interval of a mean over n prompts; None without a standard error.

    For scores in [0, 1] it stays in [0, 1]. It is Wilson's interval of as many independent rows as
    would give this standard error:

        m = p (1 − p) / stderr²        (p + t²/2m ± t √(p (1 − p) / m + t²/4m²)) / (1 + t²/m)

    with Student's t for n − 1 degrees of freedom. For scores that are all 0 or 1:

        m = p (1 − p) / stderr² · n / (n − 1), or n if `stderr` is 0; but never more than `rows`

    With exactly one row a prompt, m equals n, and the normal quantile
    replaces t: this is Wilson's own interval. Scores outside of [0, 1] get score ± t · stderr.

    Args:
        score: The mean, weighted or not.
        stderr: Its standard error, clustered by prompt.
        scores: [N], which say if the scores are 0 or 1, or in [0, 1].
        rows: N, or the effective number of weighted rows.
    Reference: E. B. Wilson, JASA 22, 1927; N. Dean and M. Pagano, J. Surv. Stat. Methodol. 3, 2015,
    for clusters.

    >>> low, high = score_interval(1.0, 0.0, 6, [1.0] * 6, 6)
    >>> round(low, 3), high
    (0.61, 1.0)
    """
    if stderr is None:
        return None
    quantile = student_quantile((1 + confidence) / 2, n - 1)
    scores = np.asarray(scores, np.float64)
    spread = score * (1 - score)
    if scores.min() < 0 or scores.max() > 1:
        return score - quantile * stderr, score + quantile * stderr
    if np.isin(scores, (0, 1)).all():
        if rows == n:
            quantile = NormalDist().inv_cdf((1 + confidence) / 2)
        size = spread * n / ((n - 1) * stderr**2) if stderr else n
        size = min(size, rows)
    elif stderr:
        size = spread / stderr**2
    else:
        return score, score
    square = quantile**2 / size
    middle = (score + square / 2) / (1 + square)
    half = math.sqrt(square * (spread + square / 4)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)


# -- paired differences


def _paired(differences: Sequence[float], step: float) -> tuple[float, float, int]:
    """Return mean, standard error and degrees of freedom of paired differences."""
    values = [*differences, step, -step] if step else list(differences)
    weights = np.ones(len(values))
    if step:
        weights[-2:] = 0.5
    n = round(weights.sum())
    mean = math.fsum(differences) / n
    square = float((weights * (np.asarray(values) - mean) ** 2).sum()) / (n - 1)
    return mean, math.sqrt(square / n), n - 1


def paired_interval(
    differences: Sequence[float],
    step: float = 0.0,
    limit: float = math.inf,
    confidence: float = CONFIDENCE,
) -> Interval | None:
    """Return Student's interval of the mean of paired differences; None for fewer than two.

    Differences of 0/1 scores are often all equal, and then have no variance. So one prompt is
    added, half of it a `step` up and half a step down: Agresti and Min's interval, with t.

    Args:
        differences: [n], one for each prompt.
        step: Smallest change of a prompt's score: 1/m for the mean of m scores that are 0 or 1. 0:
            the scores are not of that kind, and nothing is added.
        limit: Largest possible difference, which bounds the interval.
    Reference: A. Agresti and Y. Min, Stat. Med. 24, 2005; E. Miller,
    https://arxiv.org/abs/2411.00640, section 4.2, for pairs.

    >>> paired_interval([0.5, 0.5, 0.5])
    (0.5, 0.5)
    """
    if len(differences) < 2:
        return None
    mean, stderr, degrees = _paired(differences, step)
    half = student_quantile((1 + confidence) / 2, degrees) * stderr
    return max(mean - half, -limit), min(mean + half, limit)


def paired_p_value(differences: Sequence[float], step: float = 0.0) -> float:
    """Return the two-sided p-value of the t-test that belongs to `paired_interval`.

    Equal differences have no variance: then 2^(1 − n), the p-value of the sign test. A single
    difference has p = 1.

    >>> round(paired_p_value([1.0, 2.0, 3.0]), 4)
    0.0742
    """
    if len(differences) < 2 or not any(differences):
        return 1.0
    mean, stderr, degrees = _paired(differences, step)
    if stderr < 1e-9 * abs(mean):
        return 2.0 ** (1 - len(differences))
    tail = student_cdf(-abs(mean) / stderr, degrees)
    return 2 * max(0.0, tail)  # rounding may put the smallest tails below 0


def unpaired_difference(
    before: np.ndarray, after: np.ndarray, confidence: float = CONFIDENCE
) -> tuple[float, Interval | None, float]:
    """Return the difference of two means over different prompts, its interval and its two-sided
    p-value.

        d = ā − b̄        stderr² = s_a² / n_a + s_b² / n_b

    Student's t with min(n_a, n_b) − 1 degrees of freedom, which is a little wide for any two
    variances. Over the same prompts `paired_interval` is narrower. Without any variance, or with
    a single prompt on one side, there is no interval, and p is 1.

    Args:
        before, after: [n_b], [n_a], one value for each prompt.
    Reference: W. G. Cochran, Biometrics 20, 1964, for the degrees of freedom.

    >>> difference, interval, p = unpaired_difference(np.array([1.0, 3.0]), np.array([2.0, 6.0]))
    >>> difference, round(p, 3)
    (2.0, 0.535)
    """
    difference = float(after.mean() - before.mean())
    degrees = min(len(before), len(after)) - 1
    squares = sum(side.var(ddof=1) / len(side) for side in (before, after)) if degrees else 0.0
    if not squares:
        return difference, None, 1.0
    stderr = math.sqrt(squares)
    half = student_quantile((1 + confidence) / 2, degrees) * stderr
    p = 2 * max(0.0, student_cdf(-abs(difference) / stderr, degrees))
    return difference, (difference - half, difference + half), p


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for their number: the i-th smallest of m times m − i + 1, and at
    least its predecessor.

    If those at most α count as differences, the probability of any false one is at most α.

    Reference: S. Holm, A simple sequentially rejective multiple test procedure, Scand. J. Statist.
    6, 1979.

    >>> holm([0.25, 0.0625, 0.125])
    [0.25, 0.1875, 0.25]
    """
    order = np.argsort(p_values, kind="stable")
    remaining = np.arange(len(order), 0, -1)
    corrected = np.maximum.accumulate(np.asarray(p_values)[order] * remaining)
    by_place = np.empty(len(order))
    by_place[order] = np.minimum(corrected, 1.0)
    return by_place.tolist()


# -- importance sampling


def self_normalized(
    log_weights: np.ndarray, scores: np.ndarray, prompts: np.ndarray
) -> tuple[float, float]:
    """Estimate a policy's mean score from rows of another policy, with its standard error.

        V = Σ_t (Σ_i w_it s_it / m_i) / (Σ_i w_it / m_i)

    w_it is the ratio of both policies' probabilities of row i up to and with turn t, and s_it what
    that turn earned. A row that ended earlier keeps its last ratio. With T = 1 this is
    self-normalised importance sampling over all rows. Normalising within each prompt instead would
    pull V towards the sampler's mean. The standard error is the jackknife's over prompts.

    Args:
        log_weights: [N, T], with any common factor.
        scores: [N, T], which add up to the rows' scores.
        prompts: [N] int, from 0 to n − 1. Each prompt counts the same: m_i is its number of rows.
    Reference: A. Owen, Monte Carlo theory, methods and examples, 2013, section 9.2; D. Precup et
    al., Eligibility Traces for Off-Policy Policy Evaluation, 2000, for turns.
    """
    counts = np.bincount(prompts)
    weights = np.exp(log_weights - log_weights.max(axis=0)) / counts[prompts, None]
    shape = (len(counts), log_weights.shape[1])
    earned, total = np.zeros(shape), np.zeros(shape)
    np.add.at(earned, prompts, weights * scores)
    np.add.at(total, prompts, weights)
    with np.errstate(invalid="ignore", divide="ignore"):  # one prompt may have all the weight
        without = ((earned.sum(0) - earned) / (total.sum(0) - total)).sum(1)
    n = len(counts)
    stderr = math.sqrt((n - 1) / n * ((without - without.mean()) ** 2).sum())
    return float((earned.sum(0) / total.sum(0)).sum()), stderr


def effective_rows(log_weights: np.ndarray) -> float:
    """Return (Σ w)² / Σ w²: as many rows of equal weight have the same variance.

    Reference: L. Kish, Survey Sampling, 1965.

    >>> effective_rows(np.log([1.0, 1.0, 1.0, 1.0])), effective_rows(np.array([0.0, -99.0]))
    (4.0, 1.0)
    """
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / (weights**2).sum())


def pareto_k(log_weights: np.ndarray) -> float:
    """Return k̂, the shape of the Pareto distribution that the largest weights follow.

    Above 0.7 an importance sampling estimate of any practical size is dominated by weights that
    were not drawn. The largest min(N/5, 3 √N) weights are fitted. −∞: they are all equal. ∞: too
    few differ to fit them.

    Reference: A. Vehtari et al., Pareto Smoothed Importance Sampling,
    https://arxiv.org/abs/1507.02646, with its prior on k in appendix C; J. Zhang and M. Stephens,
    Technometrics 51, 2009, for the fit.
    """
    num_rows = len(log_weights)
    num_largest = math.ceil(min(num_rows / 5, 3 * math.sqrt(num_rows)))
    largest = np.sort(log_weights)[-num_largest - 1 :]
    largest = np.exp(largest - largest[-1])
    excess = largest[1:] - largest[0]
    excess = excess[excess > 1e-9]
    if len(excess) < 5:
        return math.inf if len(excess) else -math.inf
    k = _generalized_pareto(excess)
    return (len(excess) * k + 10 * 0.5) / (len(excess) + 10)


def _generalized_pareto(excess: np.ndarray) -> float:
    """Return the shape k of the generalised Pareto distribution of ascending excesses: Zhang and
    Stephens' posterior mean of θ = −k/σ over a grid, and the k that maximises the likelihood
    there."""
    n = len(excess)
    num_points = 30 + int(math.sqrt(n))
    grid = 1 - np.sqrt(num_points / (np.arange(num_points) + 0.5))
    grid = 1 / excess[-1] + grid / (3 * excess[int(n / 4 + 0.5) - 1])
    shapes = np.log1p(-np.outer(grid, excess)).mean(axis=1)
    likelihoods = n * (np.log(-grid / shapes) - shapes - 1)
    weights = np.exp(likelihoods - likelihoods.max())
    theta = (grid * weights).sum() / weights.sum()
    return float(np.log1p(-theta * excess).mean())
