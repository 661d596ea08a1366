"""Choice of the KL term's reference for an iteration: a policy of the run, or a moving average.

reference = choose_reference(recipe, policies, 3, previous)
"""

from __future__ import annotations

from collections.abc import Sequence

from quiver.stages.logprobs.average import Config as AverageConfig

from .recipe import Recipe
from .tasks import perform


def choose_reference(
    recipe: Recipe, policies: Sequence[str], iteration: int, previous: str | None
) -> str | None:
    """Return the reference of this iteration's KL term, or None if `optimize.kl_coef` is 0.

    Args:
        recipe: The resolved recipe.
        policies: The policies to choose from, oldest first: the starting policy of every iteration
            so far, or only the base for a fixed rule.
        iteration: Number of the iteration, from 1.
        previous: The previous iteration's reference, which a moving average continues.
    """
    rule = recipe.reference
    if recipe.optimize.kl_coef == 0:
        return None
    if rule.rule != "ema" or previous is None:
        return policies[rule.start(len(policies)) - 1]
    average = perform(
        recipe,
        "average",
        AverageConfig(rate=rule.rate),
        {"reference": previous, "policy": policies[-1]},
        label=f"reference {iteration}/{recipe.iterations}",
        into=f"{recipe.run}.ref",
        iteration=iteration,
    )
    return average.ref
