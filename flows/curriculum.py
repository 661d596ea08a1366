"""[data] curriculum: selection of the rewards by which the prompts of a round are chosen.

These are the rewards of the last iterations and of earlier rounds of this one. They belong to the
prompts' lineage and run key. `overlap = 1` uses the same ones as `overlap = 0`: iteration k+1 is
sampled while k optimizes, when k is scored. A night uses its own iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

from .recipe import Recipe
from .sampled import Sampled


def measured_before(
    recipe: Recipe, iteration: int, earlier: Sequence[Sampled]
) -> dict[str, list[str]]:
    """Return the references by role that the prompts of `iteration` take besides the policy.

    Empty without a curriculum, or before anything was scored. `earlier` holds all rounds before,
    oldest first.
    """
    curriculum = recipe.data.curriculum
    if curriculum is None:
        return {}
    first = iteration - curriculum.iterations
    rewards = [sampled.rewards for sampled in earlier if sampled.iteration >= first]
    return {"rewards": rewards} if rewards else {}
