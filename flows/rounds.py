"""Rounds of sampling, `Round`, and what is made of them, `Iteration`; `fill_up` adds rounds.

    iteration.rounds[0].rollouts                        # arith/rollouts@4, of the first round
    iteration.policy                                    # arith/policy@4, which learned from all

[data] refill samples further rounds of prompts until enough groups have contrast. This is the
dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476, section 3.2). A group has contrast if
its scored rewards are not all equal; other groups teach nothing. Each round makes its own versions
of prompts, rollouts and rewards, by the same policy. It takes the next `limit` rows of the data,
and optimize learns from all rounds of the iteration together.

Rounds are counted over the whole run, and their number decides rows and seeds: if iteration 1 took
rounds 1 to 3, iteration 2 begins with round 4. So no row is asked twice before all were asked, and
a restarted run takes the same rounds, by the manifests alone.

Some losses need further logprobs of saved rollouts. The KL term compares with a reference policy:
any policy of the store, or one that follows the run's. The ratio's denominator, the proximal
logprobs, is computed with the trainer's numerics, if the recipe asks for it or the training needs
it. With `prox_of = "behaviour"`, they are made right after sampling, under the policy that sampled.
With `"start"`, they are made for all rollouts of an iteration, replayed ones too, under the policy
that its training starts from. `stages/optimize/losses.py` names all these policies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quiver.schemas.metrics import groups_with_contrast
from quiver.stages.core.store import Store
from quiver.stages.logprobs.average import Config as AverageConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.checks import biases

from .calls import perform
from .sections import Logprobs, Optimize, Reference, Refill

log = logging.getLogger("quiver")


@dataclass(frozen=True)
class Round:
    """A round of rollouts that one iteration learns from, sampled by one policy."""

    iteration: int
    """Number of the iteration, from 1."""
    number: int
    """Number of the round, counted from 1 over the whole run; it decides rows and seeds. Without
    [data] refill, each iteration has one round with the iteration's number."""
    prompts: str
    """Reference of the prompts; the fields below are references too."""
    rollouts: str
    rewards: str
    prox_logprobs: str | None
    """Logprobs for the ratio's denominator, with the trainer's numerics. None: not needed, or not
    made yet."""
    reward_mean: float | None
    num_scored: int
    """Number of rewards that are not null."""
    seconds: dict[str, float]
    """Seconds by stage."""
    contrast_groups: int | None = None
    """Number of groups with different rewards. None: without [data] refill."""


@dataclass(frozen=True)
class Iteration:
    """A whole iteration: its rounds, and the policy that learned from them."""

    rounds: tuple[Round, ...]
    """Usually one; with [data] refill there may be more."""
    ref_logprobs: str | None
    """The first round's logprobs under the KL term's reference policy. None: the loss has no KL
    term."""
    policy: str
    """The policy that this iteration made."""
    seconds: dict[str, float]
    """Seconds by stage, over all rounds."""
    evaluation: dict[str, Any] | None = None
    """Score, standard error and n of that policy and, as `baseline`, of the base model. None: not
    measured."""

    @property
    def number(self) -> int:
        """Number of the iteration, from 1."""
        return self.rounds[0].iteration

    @property
    def reward_mean(self) -> float | None:
        """Mean over the rewards of all rounds that are not null."""
        if len(self.rounds) == 1:
            return self.rounds[0].reward_mean
        num_scored = sum(sampled.num_scored for sampled in self.rounds)
        total = sum((sampled.reward_mean or 0.0) * sampled.num_scored for sampled in self.rounds)
        return total / num_scored if num_scored else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `quiver run --json`, without logprobs that were not asked for.

        References are those of the first round. With [data] refill, `rounds` lists each round with
        its number, references and groups with contrast. Without it, nothing about rounds is
        included.
        """
        first = self.rounds[0]
        fields = {**vars(first), **vars(self), "reward_mean": self.reward_mean}
        for name in ("number", "num_scored", "contrast_groups", "rounds"):
            del fields[name]
        for name in ("prox_logprobs", "ref_logprobs"):
            if fields[name] is None:
                del fields[name]
        if first.contrast_groups is not None:
            names = ("prompts", "rollouts", "rewards", "contrast_groups")
            fields["rounds"] = [
                {"round": sampled.number, **{name: getattr(sampled, name) for name in names}}
                for sampled in self.rounds
            ]
        return fields


def fill_up(
    refill: Refill,
    store: str,
    first: Round,
    earlier: Sequence[Round],
    sample_round: Callable[[int, Sequence[Round]], Round],
    label: str,
) -> list[Round]:
    """Add further rounds to the first round of an iteration until enough groups have contrast.

    Args:
        refill: [data] refill: how many groups need contrast, and the most rounds.
        store: Folder of the store.
        first: The iteration's first round.
        earlier: All rounds of previous iterations.
        sample_round: Makes a round, given its number and all rounds before it.
        label: Name of the iteration in logs.

    Returns:
        All rounds of the iteration, with their `contrast_groups`.
    """
    opened = Store(store).with_expired()
    rounds: list[Round] = []
    num_groups = 0
    num_contrast = 0
    while num_contrast < refill.groups and len(rounds) < refill.max_rounds:
        sampled = first
        if rounds:
            sampled = sample_round(rounds[-1].number + 1, [*earlier, *rounds])
        groups = opened.open(sampled.rewards).manifest.metrics["groups"]
        sampled = replace(sampled, contrast_groups=groups_with_contrast(groups))
        rounds.append(sampled)
        num_groups += groups["count"]
        num_contrast += sampled.contrast_groups
    is_short = num_contrast < refill.groups
    log.log(
        logging.WARNING if is_short else logging.INFO,
        "%-22s %d of %d groups have contrast after %d of at most %d rounds%s",
        label,
        num_contrast,
        num_groups,
        len(rounds),
        refill.max_rounds,
        f"; data.refill asks for {refill.groups}" if is_short else "",
    )
    return rounds


# -- further logprobs of saved rollouts


def choose_kl_reference(
    rule: Reference, policies: Sequence[str], previous: str, **options: Any
) -> str:
    """Return the reference policy of an iteration's KL term.

    Args:
        rule: The recipe's [reference].
        policies: The starting policy of every iteration so far, oldest first.
        previous: The previous iteration's reference policy; in the first iteration, the one that
            the run begins with.
        options: Label, run and iteration of the stage that mixes the weights.
    """
    num_done = len(policies) - 1
    weight = rule.weight_of_newest
    is_due = weight > 0 and num_done > 0 and num_done % rule.iterations == 0
    if not is_due:
        return previous
    if weight == 1:
        return policies[-1]
    refs = {"reference": previous, "policy": policies[-1]}
    # a stage beside logprobs: logprobs/average.py
    return perform("average", AverageConfig(rate=weight), refs, **options).ref


def proximal_config(
    optimize: Optimize, logprobs: Logprobs, samplings: Iterable[Mapping[str, Any]]
) -> LogprobsConfig | None:
    """Return the logprobs config for the ratio's denominator, or None if it is not needed.

    It is needed if a clip bound is below 0.05 (`TIGHT_CLIP`) or the denominator is the policy at
    the start of the update (both `optimize.needs_prox`), or if sampling was biased. Old rollouts
    alone are no reason: they bring the logprobs of their sampler.

    Args:
        samplings: The sampling sections of the rollouts to train on.
    """
    needed = optimize.needs_prox or any(map(biases, samplings))
    if not (needed or logprobs.prox):
        return None
    config = logprobs.for_role("prox")
    changes: dict[str, Any] = {"prox_of": optimize.prox_of}
    if config.precision == "auto":
        is_stochastic = optimize.precision == "bf16_stochastic"
        changes["precision"] = "bf16_pure" if is_stochastic else optimize.precision
    return config.model_copy(update=changes)
