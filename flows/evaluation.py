"""Measurement of a policy on the held-out rows: generate, reward, and the estimators.

Prompts, rollouts and rewards go to `<run>.eval`, so that `latest` in the training run does not
move. The evaluation itself, with score, standard error and n, goes to `<run>`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from quiver.schemas.metrics import score_numbers
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.call import Outcome

from .calls import check_stages, perform
from .recipe import Recipe
from .tracking import track_evaluation


def measure(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: Collection[str] = (),
    baseline: str | None = None,
    before: Callable[[], None] = lambda: None,
) -> Outcome | None:
    """Measure `policy` on the held-out rows.

    Tasks are named after the policy, since one iteration may measure several.

    Args:
        recipe: The resolved recipe.
        policy: Reference of the policy.
        iteration: Iteration that the tasks are tagged with.
        forced: Stages to run again; only "evaluate" matters here.
        baseline: An evaluation of another policy on the same rows. The metrics then hold the
            difference to it.
        before: Called before anything is sampled; it may refuse to begin.

    Returns:
        The outcome of the evaluate stage (metrics: score, stderr, n, …), with the seconds of all
        its stages. None if there are no held-out rows.
    """
    if recipe.data.held_out is None:
        return None
    name = policy.removeprefix(f"{recipe.run}/")

    def measured_by(stage: str, config: Config, into: str, **refs: str) -> Outcome:
        return perform(
            stage,
            config,
            refs,
            label=f"evaluate {name}: {stage}",
            into=into,
            force="evaluate" in forced and stage != "prompt",
            iteration=iteration,
            before=check if stage == "generate" else lambda: None,
        )

    def check() -> None:
        before()
        check_stages({"reward": recipe.reward}, prompts.ref, recipe.offered_columns)

    run = partial(measured_by, into=f"{recipe.run}.eval")
    prompts = run("prompt", recipe.prompt_config(0, evaluation=True), policy=policy)
    config = recipe.generate_config(0, evaluation=True)
    rollouts = run("generate", config, prompts=prompts.ref, policy=policy)
    rewards = run("reward", recipe.reward, rollouts=rollouts.ref)
    refs = {"rollouts": rollouts.ref, "rewards": rewards.ref}
    if baseline:
        refs["baseline"] = baseline
    evaluation = measured_by("evaluate", recipe.score_config(), recipe.run, **refs)
    # Also for a finished evaluation: an earlier attempt may have ended before this line.
    track_evaluation(recipe, evaluation.ref)
    seconds = sum(outcome.seconds for outcome in (prompts, rollouts, rewards, evaluation))
    return replace(evaluation, seconds=round(seconds, 3))


def numbers(outcome: Outcome | None) -> dict[str, Any] | None:
    """Return score, standard error and n of an evaluation, what it leaves out, and its
    reference."""
    return outcome and {**score_numbers(outcome.metrics), "ref": outcome.ref}
