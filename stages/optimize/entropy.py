"""Entropy of the policy's tokens in the loss: a bonus, with a fixed or steered coefficient, and a
choice of the tokens that the policy learns from.

    coef = bonus(config, entropy_coef, last_entropy)      # loss − coef · Σ weight · entropy
    entropy_coef = next_coefficient(config, entropy_coef, entropy)
    learns = uncertain(entropies, share=0.2)

Not of the spine: numbers in, numbers out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .config import Config


def bonus(config: Config, coef: float, last_entropy: float | None) -> float:
    """Return a step's coefficient: `coef` or, with a target, 0 if the previous step's mean entropy
    in nats a token was above the target or is None, unknown.

    Reference: Skywork-OR1, https://arxiv.org/abs/2505.22312 (adaptive entropy control).
    """
    target = config.entropy_target
    if target is None or (last_entropy is not None and last_entropy <= target):
        return coef
    return 0.0


def next_coefficient(config: Config, coef: float, entropy: float) -> float:
    """Return `coef` moved by `entropy_coef_step`: up if a step's mean `entropy` was at most the
    target, else down; within 0 and `entropy_coef_max`. Without a target it stays.

    The reference is the same. TRL does this too; verl has no target.
    """
    if config.entropy_target is None:
        return coef
    change = config.entropy_coef_step
    if entropy > config.entropy_target:
        change = -change
    return min(max(coef + change, 0.0), config.entropy_coef_max)


def uncertain(entropies: Tensor, share: float) -> Tensor:
    """Select the tokens of highest entropy: at or above the (1 − share) quantile, interpolated.

    Forking tokens, at which the policy hesitates, carry nearly all that is learned.

    Args:
        entropies: [n] of all tokens of the optimizer step, in nats.
        share: in (0, 1].
    Returns:
        [n] bool.

    Reference: https://arxiv.org/abs/2506.01939; TRL's `top_entropy_quantile`.
    """
    threshold = np.quantile(entropies.double().numpy(), 1 - share)
    return entropies.double() >= torch.tensor(threshold)
