"""[data] curriculum: the rewards by which the prompts of a round are chosen.

These are all that the last iterations measured, and the earlier rounds of this one; so they are
the prompts' lineage, and part of their key. With `overlap = 1` they are the same ones as without:
iteration k+1 is sampled while k optimizes, when k is scored. A night looks at its own iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

from .recipe import Recipe
from .sampled import Sampled


def measured_before(
    recipe: Recipe, iteration: int, earlier: Sequence[Sampled]
) -> dict[str, list[str]]:
    """The references by role that the prompts of `iteration` take besides the policy: nothing
    without a curriculum, or before anything was measured. `earlier`: all rounds before, oldest
    first."""
    curriculum = recipe.data.curriculum
    if curriculum is None:
        return {}
    first = iteration - curriculum.iterations
    rewards = [sampled.rewards for sampled in earlier if sampled.iteration >= first]
    return {"rewards": rewards} if rewards else {}
