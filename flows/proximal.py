"""The proximal logprobs of rollouts: the ratio's denominator, scored with the trainer's numerics.

They are scored if the recipe asks for them or the training needs them. With `prox_of =
"behaviour"`, rollouts are scored right after sampling, under the policy that sampled them. With
`"start"`, all rollouts of an iteration, replayed ones too, are scored under the policy that its
training starts from.

    outcomes = score_behaviour(recipe, rollouts.ref, policy, perform, forced=())
    sources = score_start(recipe, policy, [sampled, *earlier], forced=())
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from quiver.stages.common.runtime.runner import Outcome
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.checks import biases

from .recipe import Recipe

_Source = TypeVar("_Source")


def proximal_config(
    recipe: Recipe, samplings: Iterable[Mapping[str, Any]]
) -> LogprobsConfig | None:
    """Return the logprobs config for the ratio's denominator, or None if it is not needed.

    `samplings`: the sampling sections of the rollouts to train on.
    """
    needed = recipe.optimize.needs_prox or any(map(biases, samplings))
    if not (needed or recipe.logprobs.prox):
        return None
    config = recipe.logprobs_config("prox")
    changes: dict[str, Any] = {"prox_of": recipe.optimize.prox_of}
    if needed and config.precision == "auto":
        precision = recipe.optimize.precision
        changes["precision"] = "bf16_pure" if precision == "bf16_stochastic" else precision
    return config.model_copy(update=changes)


def score_behaviour(
    recipe: Recipe,
    rollouts: str,
    policy: str,
    perform: Callable[..., Outcome],
    forced: Collection[str],
) -> dict[str, Outcome]:
    """Score the proximal logprobs of `rollouts` under `policy`, which sampled them.

    Args:
        recipe: The resolved recipe.
        rollouts: Reference of the rollouts.
        policy: The policy that sampled them.
        perform: Runs a stage, with the signature of `tasks.perform`.
        forced: Stages to run again.

    Returns:
        The outcome by the name of the step. Empty if nothing needs it, or if `prox_of` names a
        policy that does not exist yet.
    """
    config = proximal_config(recipe, [recipe.generate.sampling.model_dump()])
    if config is None or not config.is_of_sampler:
        return {}
    refs = {"rollouts": rollouts, "policy": policy}
    outcome = perform(recipe, "logprobs", config, refs, force="logprobs" in forced)
    return {"logprobs prox": outcome}


def score_start(
    recipe: Recipe, policy: str, sources: Sequence[_Source], forced: Collection[str]
) -> list[_Source]:
    """Add proximal logprobs to rounds if `prox_of = "start"`; else return them unchanged.

    They are scored under `policy`, which is about to be trained. `sources` begins with the rounds
    of the current iteration.
    """
    from .tasks import perform

    if recipe.optimize.prox_of != "start":
        return list(sources)
    config = proximal_config(recipe, ())
    scored = []
    for source in sources:
        about: dict[str, Any] = {"force": "logprobs" in forced, "round": source.round}
        if source.iteration != sources[0].iteration:
            about = {"label": f"logprobs of {source.iteration}/{recipe.iterations}"}
        refs = {"rollouts": source.rollouts, "policy": policy}
        outcome = perform(recipe, "logprobs", config, refs, iteration=source.iteration, **about)
        seconds = {**source.seconds, "logprobs prox": outcome.seconds}
        scored.append(dataclasses.replace(source, prox_logprobs=outcome.ref, seconds=seconds))
    return scored
