"""Estimators of an evaluation: the mean with a clustered standard error, unbiased pass@k, and
paired differences.

Samples of one prompt are correlated, so the groups are the independent units: n counts groups,
never samples. Legend: n groups, group g with m_g scored samples s_gi, c_g of them correct.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .statistics import paired_interval, paired_p_value, score_interval, student_quantile


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
        groups: Scores by group id: at least one group, and a score in each.
    Reference: E. Miller, Adding Error Bars to Evals, 2024, https://arxiv.org/abs/2411.00640

    >>> clustered_mean({"a": [1.0, 0.0], "b": [1.0, 1.0]})
    Estimate(score=0.75, stderr=0.25, n=2)
    """
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
    samples. 1 ≤ k ≤ samples, and 0 ≤ correct ≤ samples.

    Reference: M. Chen et al., Evaluating Large Language Models Trained on Code, 2021, eq. 1,
    https://arxiv.org/abs/2107.03374

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def group_passes(
    groups: Mapping[str, Sequence[float]], k: int, threshold: float
) -> dict[str, float]:
    """Return the pass@k of each group that has k scores; a sample is correct if its score is at
    least `threshold`."""
    return {
        group: pass_at_k(len(scores), sum(score >= threshold for score in scores), k)
        for group, scores in groups.items()
        if len(scores) >= k
    }


def lower_bound(estimate: Estimate, confidence: float) -> float | None:
    """Return the one-sided lower confidence bound of an estimate, score − t · stderr; None without
    a standard error.

    t is the quantile of `confidence` in Student's distribution with n − 1 degrees of freedom: 0.5
    gives the score itself, 0.95 gives score − 1.685 · stderr with 40 groups.

    >>> lower_bound(Estimate(0.25, 0.125, 40), 0.5)
    0.25
    """
    if estimate.stderr is None:
        return None
    return estimate.score - student_quantile(confidence, estimate.n - 1) * estimate.stderr


def with_interval(groups: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return `clustered_mean` as plain numbers, with the 95 % interval by `score_interval`."""
    estimate = clustered_mean(groups)
    scores = [score for of_group in groups.values() for score in of_group]
    return {**estimate._asdict(), "interval": score_interval(*estimate, scores, len(scores))}


def differences(
    ours: Mapping[str, Sequence[float]],
    theirs: Mapping[str, Sequence[float]],
    passes_at: Sequence[int],
    thresholds: tuple[float, float],
) -> dict[str, Any]:
    """Return ours − theirs as plain numbers: `score`, and `pass@k` with one entry for each k at
    which both have a prompt with k scores. Each has `score`, `stderr`, `n`, the 95 % `interval`
    and the p-value `p`.

    Args:
        ours: Scores by prompt; at least one prompt is in both.
        theirs: Scores by prompt, under the same names.
        passes_at: The numbers k.
        thresholds: Smallest score of a correct sample of ours, and of theirs.
    """
    groups = [*ours.values(), *theirs.values()]
    most_samples = max(map(len, groups))
    scores = {score for group in groups for score in group}
    step = 1 / most_samples if scores <= {0, 1} else 0.0
    limit = 1.0 if min(scores) >= 0 and max(scores) <= 1 else math.inf
    passes = {}
    for k in passes_at:
        our_passes, their_passes = (
            group_passes(scores, k, threshold)
            for scores, threshold in zip((ours, theirs), thresholds, strict=True)
        )
        if our_passes.keys() & their_passes.keys():
            passes[str(k)] = _difference(our_passes, their_passes, k / most_samples, 1.0)
    return {
        "score": _difference(group_means(ours), group_means(theirs), step, limit),
        "pass@k": passes,
    }


def _difference(
    ours: Mapping[str, float], theirs: Mapping[str, float], step: float, limit: float
) -> dict[str, Any]:
    """Return the entry of `differences` for one result by prompt, a prompt's mean or its pass@k.

        d_g = a_g − b_g        score = Σ_g d_g / n
        stderr = √( Σ_g (d_g − score)² / (n (n − 1)) )

    A prompt's difficulty for both cancels, so the error is smaller than √(stderr_a² + stderr_b²),
    which is for two sets of prompts. Prompts that only one of them has are left out.

    Reference: E. Miller, Adding Error Bars to Evals, 2024, section 4.2,
    https://arxiv.org/abs/2411.00640
    """
    changes = {name: [ours[name] - theirs[name]] for name in ours if name in theirs}
    numbers = [change for (change,) in changes.values()]
    return {
        **clustered_mean(changes)._asdict(),
        "interval": paired_interval(numbers, step, limit),
        "p": paired_p_value(numbers, step),
    }
