"""Measure a policy on the held-out rows: generate + reward + estimators, in a run of its own, so
that training's `latest` stays.

The prompts, rollouts and rewards go to `<run>.eval`; the evaluation itself, with score, standard
error and n, to `<run>`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quiver.schemas.errors import ConfigError
from quiver.stages.common.runtime.runner import Outcome

from .recipe import Recipe
from .tasks import check_rewards, describe, perform

log = logging.getLogger("quiver")


def measure(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: set[str] = frozenset(),
    baseline: str | None = None,
    run: Callable[..., Outcome] | None = None,
) -> Outcome | None:
    """The evaluation of `policy` (metrics: score, stderr, n, …), the seconds of all its stages;
    None without held-out rows.

    `baseline`: an evaluation of another policy on the same rows; the metrics then hold the
    difference to it too. `run` calls a stage, given recipe, stage, config, references, force and
    the run that the version goes to; None: a task of Prefect's does.
    """
    if recipe.data.held_out is None:
        return None
    aside = f"{recipe.run}.eval"

    def stage(name: str, config, into: str, **refs: str) -> Outcome:
        label, force = f"evaluate {iteration}: {name}", "evaluate" in forced and name != "prompt"
        if run is None:
            return perform(recipe, label, name, config, refs, into, force, iteration)
        outcome = run(recipe, name, config, refs, force, into)
        log.info("%s", describe(label, outcome))
        return outcome

    prompts = stage("prompt", recipe.prompt_config(0, evaluation=True), aside, policy=policy)
    config = recipe.generate_config(0, evaluation=True)
    check_rewards(recipe, prompts.ref, policy, config, aside, "evaluate" in forced)
    rollouts = stage("generate", config, aside, prompts=prompts.ref, policy=policy)
    rewards = stage("reward", recipe.reward, aside, rollouts=rollouts.ref)
    beside = {"baseline": baseline} if baseline else {}
    scored = stage(
        "evaluate",
        recipe.score_config(),
        recipe.run,
        rollouts=rollouts.ref,
        rewards=rewards.ref,
        **beside,
    )
    total = sum(outcome.seconds for outcome in (prompts, rollouts, rewards, scored))
    return replace(scored, seconds=round(total, 3))


def require_held_out(recipe: Recipe) -> None:
    """ConfigError where the recipe has nothing to measure on."""
    if recipe.data.held_out is None:
        raise ConfigError(
            "data.held_out",
            "the recipe names no held-out rows",
            next="add [data.held_out] to the recipe",
        )


def numbers(outcome: Outcome | None) -> dict[str, Any] | None:
    """Score, standard error and n of an evaluation, and its reference."""
    if outcome is None:
        return None
    return {**{key: outcome.metrics[key] for key in ("score", "stderr", "n")}, "ref": outcome.ref}
