"""Logprobs that are scored again: under the KL term's reference, and for the ratio's denominator.

The reference is a policy of the run, or a moving average (`choose_reference`).

Proximal logprobs, the ratio's denominator, have the trainer's numerics. They are scored if the
recipe asks for them or the training needs them. With `prox_of = "behaviour"`, rollouts are scored
right after sampling, under the policy that sampled them. With `"start"`, all rollouts of an
iteration, replayed ones too, are scored under the policy that its training starts from.

    reference = choose_reference(recipe, policies, 3, previous)
    outcomes = score_behaviour(recipe, rollouts.ref, policy, perform, forced=())
    sources = score_start(recipe, policy, [sampled, *earlier], forced=())
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from quiver.stages.common.runtime.runner import Outcome
from quiver.stages.logprobs.average import Config as AverageConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.checks import biases

from .recipe import Recipe
from .rounds import Sampled


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
    from .tasks import perform

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
    recipe: Recipe, policy: str, sources: Sequence[Sampled], forced: Collection[str]
) -> list[Sampled]:
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
        scored.append(replace(source, prox_logprobs=outcome.ref, seconds=seconds))
    return scored
