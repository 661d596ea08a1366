"""What the KL term of an iteration holds on to: a policy of the run, or their moving average.

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
    """What the KL term of this iteration holds on to: one of `policies` (the starting policy of
    every iteration so far), or their moving average, made of the `previous` iteration's. None where
    there is no such term."""
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
