"""Statistics within groups: what a reward pulls to, and what it goes along with.

A group is the saved answers to one prompt. A reward teaches by differences within groups only.
Pure functions of arrays, without a loop over rows. Legend: N rows, G groups. `groups` [N] int is
the number of each row's group, from 0 to G − 1. NaN stands for an unknown number; such rows are
left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_ROUNDING = 1e-6
"""Deviations below this share of the largest reward are rounding errors of float32."""


def centered(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return each value minus the mean of its group's known values: [N], 0 if it is unknown, and
    exactly 0 in a group whose known values are equal."""
    is_known = ~np.isnan(values)
    sums = np.bincount(groups, np.where(is_known, values, 0.0))
    means = sums / np.maximum(num_known(values, groups), 1)
    # the mean of equal numbers may be another number
    varies = is_known & has_contrast(values, groups)[groups]
    return np.where(varies, values - means[groups], 0.0)


def num_known(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return the number of known values in each group: [G] float."""
    return np.bincount(groups, ~np.isnan(values))


def has_contrast(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return true for each group that has two different known values: [G] bool."""
    num_groups = len(num_known(values, groups))
    return _highest(values, groups, num_groups) > -_highest(-values, groups, num_groups)


def _highest(values: np.ndarray, groups: np.ndarray, num_groups: int) -> np.ndarray:
    """Return the highest known value of each group, −∞ if it has none: [G]."""
    highest = np.full(num_groups, -np.inf)
    np.fmax.at(highest, groups, values)
    return highest


def spread(values: np.ndarray, groups: np.ndarray) -> float:
    """Return the standard deviation within a group, over the groups with contrast; 0 if none has.

    √( mean_g Σ_i (r_gi − r̄_g)² / (m_g − 1) )        m_g known values in group g
    """
    is_meant = has_contrast(values, groups)
    if not is_meant.any():
        return 0.0
    squares = np.bincount(groups, centered(values, groups) ** 2)
    counts = num_known(values, groups)
    return float(np.sqrt((squares[is_meant] / (counts[is_meant] - 1)).mean()))


# -- what a reward pulls to


def tilted(rewards: np.ndarray, groups: np.ndarray, beta: float) -> np.ndarray:
    """Return the weights of the saved answers under the policy that a reward pulls to: [N].

        w_gi = exp(r_gi / β) / Σ_j exp(r_gj / β)

    The policy π* ∝ π exp(r / β) maximises E[r] − β KL(π* ‖ π). The answers are samples of π, so its
    own probabilities cancel; the sum estimates the partition function from the group. With few
    answers it is estimated badly, and an expectation under w is closer to the mean of the group
    than one under π* is. The weights of a group add up to 1; an unknown reward has weight 0.

    Args:
        rewards: [N], in units of β.
        beta: Above 0; small values leave the best answer of each group alone.
    Reference: R. Rafailov et al., https://arxiv.org/abs/2305.18290, equation 4.
    """
    num_groups = len(num_known(rewards, groups))
    exponents = (rewards - _highest(rewards, groups, num_groups)[groups]) / beta
    raised = np.exp(np.where(np.isnan(rewards), -np.inf, exponents))
    with np.errstate(invalid="ignore"):  # a group without a known reward
        return np.nan_to_num(raised / np.bincount(groups, raised)[groups])


class Pull(NamedTuple):
    """The mean of a measure in each group in which it and the reward are known: [G'] each."""

    now: np.ndarray
    """Of the saved answers."""
    change: np.ndarray
    """With the weights of `tilted`, minus `now`."""
    first_order: np.ndarray
    """Cov_g(f, r) / β, the change to first order in 1 / β."""


def pull(rewards: np.ndarray, measure: np.ndarray, groups: np.ndarray, beta: float) -> Pull:
    """Return what a reward does to a measure f, by group.

        now = f̄        change = Σ_i w_i (f_i − f̄)
        first_order = Σ_i (f_i − f̄)(r_i − r̄) / (β (m − 1))

    The covariance is unbiased, so for small steps it is m / (m − 1) times `change`. It is 0
    in a group of one answer.

    Args:
        rewards: [N] r.
        measure: [N] f.
        beta: As for `tilted`.
    """
    is_known = ~(np.isnan(rewards) | np.isnan(measure))
    rewards = np.where(is_known, rewards, np.nan)
    counts = num_known(rewards, groups)
    now = np.bincount(groups, np.where(is_known, measure, 0.0)) / np.maximum(counts, 1)
    # of deviations, so that a measure that is the same for all answers changes by exactly 0
    deviations = centered(np.where(is_known, measure, np.nan), groups)
    change = np.bincount(groups, deviations * tilted(rewards, groups, beta))
    products = np.bincount(groups, deviations * np.nan_to_num(rewards))
    first_order = products / np.maximum(counts - 1, 1) / beta
    return Pull(*(numbers[counts > 0] for numbers in (now, change, first_order)))


def effective_samples(weights: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return 1 / Σ_i w_i² of each group: as many answers of equal weight vary as much. [G]

    Args:
        weights: [N], adding up to 1 in each group that has any; a group without gives ∞.
    """
    with np.errstate(divide="ignore"):
        return 1 / np.bincount(groups, weights**2)


def opposed(first: np.ndarray, second: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return minus the product of each row's advantages under two rewards if they have opposite
    signs: [N], 0 for the other rows.

    An advantage is the reward minus the mean of its group's rows that have both rewards.
    """
    is_known = ~(np.isnan(first) | np.isnan(second))
    product = -1.0
    for each in (first, second):
        rewards = np.where(is_known, each, np.nan)
        advantages = centered(rewards, groups)
        least = _ROUNDING * np.nanmax(np.abs(rewards), initial=0.0)
        product = product * np.where(np.abs(advantages) > least, advantages, 0.0)
    return np.maximum(product, 0.0)


# -- what a reward goes along with


def correlation(
    first: np.ndarray,
    second: np.ndarray,
    groups: np.ndarray,
    given: np.ndarray | None = None,
) -> float | None:
    """Return the correlation of two measures within groups; None if one of them does not vary.

    Each is centred in its group, so that neither a prompt's difficulty nor its length counts. With
    `given` it is the partial correlation: of the parts of both that a third measure does not
    explain linearly. [N] each.
    """
    measures = [first, second] if given is None else [first, second, given]
    is_known = ~np.isnan(measures).any(axis=0)
    x, y, *others = (centered(np.where(is_known, measure, np.nan), groups) for measure in measures)
    before = x @ x, y @ y
    for z in others:
        if z @ z > 0:
            x = x - z * (x @ z) / (z @ z)
            y = y - z * (y @ z) / (z @ z)
    # what is left of a measure that `given` explains wholly is rounding
    if x @ x <= _ROUNDING**2 * before[0] or y @ y <= _ROUNDING**2 * before[1]:
        return None
    return float(np.clip(x @ y / np.sqrt((x @ x) * (y @ y)), -1, 1))


def variance_shares(
    reward: np.ndarray, parts: Sequence[np.ndarray], groups: np.ndarray
) -> list[float]:
    """Return the share of each part in the reward's variance within groups.

        share_k = b_k Cov(p_k, r) / Var(r)

    b are the coefficients of least squares; they are the parts' weights if the reward is their
    weighted sum, and the shares then add up to 1. A share is negative if the part works against the
    others. An unknown part counts as 0, as in the reward. All shares are 0 if the reward does not
    vary.
    """
    is_known = ~np.isnan(reward)
    r = centered(reward, groups)
    known_parts = (np.where(is_known, np.nan_to_num(part), np.nan) for part in parts)
    p = np.stack([centered(part, groups) for part in known_parts])
    if not r @ r:
        return [0.0] * len(p)
    # parts may have any units, and `rcond` compares them
    norms = np.linalg.norm(p, axis=1, keepdims=True)
    p /= np.where(norms > 0, norms, 1.0)
    coefficients = np.linalg.lstsq(p @ p.T, p @ r, rcond=1e-9)[0]
    return (coefficients * (p @ r) / (r @ r)).tolist()
