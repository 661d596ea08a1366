"""Student's t for a mean over prompts: its p-value and interval, and Holm's correction for several
means.

Unlike the normal distribution it allows for few prompts. Legend: n prompts, ν = n − 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .estimators import Estimate


def p_value(estimate: Estimate) -> float | None:
    """Return the two-sided p-value of the hypothesis that the mean is 0; None without a standard
    error.

        t = score / stderr        p = P(|T| ≥ |t|), T ~ Student's t with ν degrees of freedom

    With stderr 0 it is 0, or 1 if the score is 0 too.
    """
    if estimate.stderr is None:
        return None
    if estimate.stderr == 0:
        return float(estimate.score == 0)
    return 1 - _within(abs(estimate.score) / estimate.stderr, estimate.n - 1)


def interval(estimate: Estimate, confidence: float) -> tuple[float, float] | None:
    """Return the interval score ± t · stderr with P(|T| ≤ t) = confidence; None without a standard
    error."""
    if estimate.stderr is None:
        return None
    low, high = 0.0, 1.0
    while _within(high, estimate.n - 1) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, estimate.n - 1) < confidence:
            low = middle
        else:
            high = middle
    return estimate.score - high * estimate.stderr, estimate.score + high * estimate.stderr


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number, which bounds the chance of any false finding.

        p̃_(i) = max over j ≤ i of min(1, (m − j + 1) · p_(j))        p_(1) ≤ … ≤ p_(m)

    Reference: S. Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979.

    >>> holm([0.5, 0.25, 0.125])
    [0.5, 0.5, 0.375]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def _within(t: float, freedom: int) -> float:
    """Return P(|T| ≤ t), by the finite series for whole degrees of freedom.

    Reference: M. Abramowitz and I. Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    square = math.cos(angle) ** 2
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for factor in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= square * (factor - 1) / factor
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
