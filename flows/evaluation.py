"""Measure a policy on the held-out rows: generate + reward + estimators, in a run of its own, so that training's `latest` stays.

The prompts, rollouts and rewards go to `<run>.eval`; the evaluation itself, with score, standard error and n, to `<run>`.
"""

from __future__ import annotations

from dataclasses import replace

from stages.common.process import Outcome

from .recipe import Recipe
from .tasks import check_rewards, perform


def measure(recipe: Recipe, policy: str, iteration: int, forced: set[str] = frozenset()) -> Outcome | None:
    """The evaluation of `policy` (metrics: score, stderr, n, …), the seconds of all its stages; None without held-out rows."""
    if recipe.data.held_out is None:
        return None
    aside = f"{recipe.run}.eval"

    def stage(name: str, config, into: str, **refs: str) -> Outcome:
        force = "evaluate" in forced and name != "prompt"
        return perform(recipe, f"evaluate {iteration}: {name}", name, config, refs, into, force)

    prompts = stage("prompt", recipe.prompt_config(0, evaluation=True), aside, policy=policy)
    check_rewards(recipe, prompts.ref)
    config = recipe.generate_config(0, evaluation=True)
    rollouts = stage("generate", config, aside, prompts=prompts.ref, policy=policy)
    rewards = stage("reward", recipe.reward, aside, rollouts=rollouts.ref)
    scored = stage("evaluate", recipe.score_config(), recipe.run, rollouts=rollouts.ref, rewards=rewards.ref)
    total = sum(outcome.seconds for outcome in (prompts, rollouts, rewards, scored))
    return replace(scored, seconds=round(total, 3))
