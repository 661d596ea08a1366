"""Logprobs of saved rollouts that the loss needs: by which policy, and with which numerics.

The KL term compares with a reference: a policy of the run, or a moving average. The ratio's
denominator, the proximal logprobs, is scored with the trainer's numerics, if the recipe asks for it
or the training needs it. With `prox_of = "behaviour"`, rollouts are scored right after sampling,
under the policy that sampled them. With `"start"`, all rollouts of an iteration, replayed ones too,
are scored under the policy that its training starts from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quiver.stages.logprobs.average import Config as AverageConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.checks import biases

from .calls import perform
from .sections import Logprobs, Optimize, Reference


def choose_reference(
    rule: Reference, policies: Sequence[str], previous: str | None, **options: Any
) -> str:
    """Return the reference of an iteration's KL term.

    Args:
        rule: The recipe's [reference].
        policies: The policies to choose from, oldest first: the starting policy of every iteration
            so far, or only the base for a fixed rule.
        previous: The previous iteration's reference, which a moving average continues.
        options: Label, run and iteration of the stage that makes a moving average.
    """
    if rule.rule != "ema" or previous is None:
        return policies[rule.start(len(policies)) - 1]
    refs = {"reference": previous, "policy": policies[-1]}
    return perform("average", AverageConfig(rate=rule.rate), refs, **options).ref


def proximal_config(
    optimize: Optimize, logprobs: Logprobs, samplings: Iterable[Mapping[str, Any]]
) -> LogprobsConfig | None:
    """Return the logprobs config for the ratio's denominator, or None if it is not needed.

    `samplings`: the sampling sections of the rollouts to train on.
    """
    needed = optimize.needs_prox or any(map(biases, samplings))
    if not (needed or logprobs.prox):
        return None
    config = logprobs.for_role("prox")
    changes: dict[str, Any] = {"prox_of": optimize.prox_of}
    if needed and config.precision == "auto":
        is_stochastic = optimize.precision == "bf16_stochastic"
        changes["precision"] = "bf16_pure" if is_stochastic else optimize.precision
    return config.model_copy(update=changes)
