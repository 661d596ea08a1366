"""Scale of a critic's rewards to unit deviation, so that one critic loss and learning rate fit
every reward.

    moments = go_on(policy.manifest.metrics.get("reward_moments"), rewards)   # kept with the policy
    batch = replace(batch, reward_scale=scale(moments))

Not of the spine: numbers in, numbers out.
"""

from __future__ import annotations

import math

from torch import Tensor

Moments = dict[str, float]
"""`count`, `mean` and `squares`: the number of rewards, their mean, and Σ (R − mean)²."""


def go_on(before: Moments | None, rewards: Tensor) -> Moments:
    """Return the moments of all rewards in a policy's trainings, `before` and these [B]; NaN, a
    missing reward, does not count.

    Reference: Chan, Golub, LeVeque 1979, Updating Formulae for Computing Sample Variances, 2.1.
    """
    before = before or {"count": 0, "mean": 0.0, "squares": 0.0}
    scored = rewards[~rewards.isnan()].double()
    count = before["count"] + len(scored)
    if not len(scored):
        return before
    mean = float(scored.mean())
    distance = mean - before["mean"]
    return {
        "count": count,
        "mean": before["mean"] + distance * len(scored) / count,
        "squares": before["squares"]
        + float((scored - mean).square().sum())
        + distance**2 * before["count"] * len(scored) / count,
    }


def scale(moments: Moments) -> float:
    """Return 1 / the unbiased (n−1) standard deviation; 1 if all rewards were equal.

    The mean is not subtracted.

    Reference: https://arxiv.org/abs/2005.12729 (reward scaling), with one reward a rollout.
    """
    if moments["count"] < 2 or not moments["squares"] > 0:
        return 1.0
    return 1 / math.sqrt(moments["squares"] / (moments["count"] - 1))
