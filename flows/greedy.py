"""The greedy answers that an algorithm such as remax compares with: generated and scored beside the
rollouts, in a run of their own, and never trained on.

    outcomes = answer_greedily(recipe, prompts.ref, policy, perform)
    outcomes["generate greedy"].ref       # my-run.greedy/rollouts@3
"""

from __future__ import annotations

from collections.abc import Callable

from quiver.stages.common.runtime.runner import Outcome

from .recipe import Recipe


def answer_greedily(
    recipe: Recipe, prompts: str, policy: str, perform: Callable[..., Outcome]
) -> dict[str, Outcome]:
    """Greedy answers of `policy` to `prompts`, and their rewards, by stage; nothing where the
    recipe's algorithm asks for none. `perform` runs a stage, as `tasks.perform` does.

    They lie in the run `<run>.greedy`, so that the latest rollouts of the recipe's own run are
    those that were trained on.
    """
    config = recipe.greedy_config()
    if config is None:
        return {}
    into = f"{recipe.run}.greedy"
    rollouts = perform(
        recipe,
        "generate",
        config,
        {"prompts": prompts, "policy": policy},
        label="greedy answers",
        into=into,
    )
    rewards = perform(
        recipe,
        "reward",
        recipe.reward,
        {"rollouts": rollouts.ref},
        label="rewards of greedy answers",
        into=into,
    )
    return {"generate greedy": rollouts, "reward greedy": rewards}
