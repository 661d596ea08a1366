"""The KL coefficient, steered towards a target over the policy's life.

    config = carried(plan)                                    # starts from the last training's
    coef = next_coefficient(config, coef, kl, num_rollouts)   # after every step

Not of the spine: numbers in, numbers out.
"""

from __future__ import annotations

from quiver.stages.common.runtime.stage import Plan

from .config import Config

MOST_ERROR = 0.2
"""Limit of the relative distance to the target."""


def carried(plan: Plan) -> Config:
    """Return the plan's config. With a target, it has the coefficient with which the policy's last
    training ended, if there is one."""
    config = plan.config
    if config.kl_target is None:
        return config
    coef = plan.inputs["policy"].manifest.metrics.get("kl_coef", config.kl_coef)
    return config.model_copy(update={"kl_coef": coef})


def next_coefficient(config: Config, coef: float, kl: float, num_rollouts: int) -> float:
    """β (1 + e · num_rollouts / kl_horizon) with e = clip(KL / kl_target − 1, −0.2, 0.2): up if a
    step's KL was above the target, else down. Without a target it stays.

    Args:
        coef: β of the step.
        kl: the step's KL to the reference, by `kl_estimator`, in nats a token.
        num_rollouts: rollouts of the step.

    Reference: https://arxiv.org/abs/1909.08593, section 2.2, whose K_β is num_rollouts /
    kl_horizon; their KL is per completion, here and in verl it is per token.
    """
    if config.kl_target is None:
        return coef
    error = min(max(kl / config.kl_target - 1, -MOST_ERROR), MOST_ERROR)
    return coef * (1 + error * num_rollouts / config.kl_horizon)
