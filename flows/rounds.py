"""Rounds of sampling, `Sampled`, and what is made of them, `Iteration`; `fill_up` adds rounds.

    sampled.rollouts                                    # arith/rollouts@4, of the first round
    [sampled.rollouts for sampled in iteration.rounds]

[data] refill samples further rounds of prompts until enough groups have contrast. This is the
dynamic sampling of DAPO (https://arxiv.org/abs/2503.14476, section 3.2). A group has contrast if
its scored rewards are not all equal; other groups teach nothing. Each round makes its own versions
of prompts, rollouts and rewards, by the same policy. It takes the next `limit` rows of the data,
and optimize learns from all rounds of the iteration together.

Rounds are counted over the whole run, and their number decides rows and seeds: if iteration 1 took
rounds 1 to 3, iteration 2 begins with round 4. So no row is asked twice before all were asked, and
a restarted run takes the same rounds, by the manifests alone.

Some losses need further logprobs of saved rollouts. The KL term compares with a reference: a policy
of the run, or a moving average. The ratio's denominator, the proximal logprobs, is scored with the
trainer's numerics, if the recipe asks for it or the training needs it. With `prox_of =
"behaviour"`, rollouts are scored right after sampling, under the policy that sampled them. With
`"start"`, all rollouts of an iteration, replayed ones too, are scored under the policy that its
training starts from.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
class Sampled:
    """A round of rollouts that one iteration learns from, sampled by one policy."""

    iteration: int
    """Number of the iteration, from 1."""
    round: int
    """Number of the round, counted from 1 over the whole run; it decides rows and seeds. Without
    [data] refill, each iteration has one round with the iteration's number."""
    prompts: str
    """Reference of the prompts; the fields below are references too."""
    rollouts: str
    rewards: str
    prox_logprobs: str | None
    """Logprobs for the ratio's denominator, with the trainer's numerics. None: not needed, or not
    scored yet."""
    reward_mean: float | None
    seconds: dict[str, float]
    """Seconds by stage."""
    contrast_groups: int | None
    """Number of groups of this round with different rewards. None: without [data] refill."""
    more: tuple[Sampled, ...]
    """The further rounds of the iteration. `reward_mean` and `seconds` include them."""

    @property
    def rounds(self) -> tuple[Sampled, ...]:
        """All rounds of the iteration; usually one."""
        return self, *self.more


@dataclass(frozen=True)
class Iteration(Sampled):
    """A whole iteration: the sampled rounds, and the policy that learned from them."""

    ref_logprobs: str | None
    """Logprobs under the reference of the KL term. None: the loss has no KL term."""
    policy: str
    """The policy that this iteration made."""
    evaluation: dict[str, Any] | None = None
    """Score, standard error and n of that policy and of the baseline. None: not measured."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `quiver run --json`, without logprobs that were not asked for.

        With [data] refill, they list each round with its number, references and groups with
        contrast. Without it, nothing about rounds is included.
        """
        optional = ("prox_logprobs", "ref_logprobs")
        of_rounds = ("round", "contrast_groups", "more")
        fields = {
            name: field
            for name, field in asdict(self).items()
            if name not in of_rounds and (field is not None or name not in optional)
        }
        if self.contrast_groups is not None:
            names = ("round", "prompts", "rollouts", "rewards", "contrast_groups")
            fields["rounds"] = [
                {name: getattr(sampled, name) for name in names} for sampled in self.rounds
            ]
        return fields


def fill_up(
    refill: Refill,
    store: str,
    first: Sampled,
    earlier: Sequence[Sampled],
    sample_round: Callable[[int, Sequence[Sampled]], Sampled],
    label: str,
) -> Sampled:
    """Add further rounds to the first round of an iteration until enough groups have contrast.

    Args:
        refill: The rule of [data].
        store: Folder of the store.
        first: The iteration's first round.
        earlier: All rounds of previous iterations.
        sample_round: Makes a round, given its number and all rounds before it.
        label: Name of the iteration in logs.

    Returns:
        The first round, with the others in `more`.
    """
    opened = Store(store).with_expired()
    rounds: list[Sampled] = []
    num_groups = 0
    num_contrast = 0
    num_scored = 0
    reward_sum = 0.0
    seconds: Counter[str] = Counter()
    while num_contrast < refill.groups and len(rounds) < refill.max_rounds:
        sampled = first
        if rounds:
            sampled = sample_round(rounds[-1].round + 1, [*earlier, *rounds])
        manifest = opened.open(sampled.rewards).manifest
        groups = manifest.metrics["groups"]
        sampled = replace(sampled, contrast_groups=groups_with_contrast(groups))
        rounds.append(sampled)
        num_groups += groups["count"]
        num_contrast += sampled.contrast_groups
        num_scored += manifest.status["scored"]
        reward_sum += (sampled.reward_mean or 0.0) * manifest.status["scored"]
        seconds.update(sampled.seconds)
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
    return replace(
        rounds[0],
        more=tuple(rounds[1:]),
        reward_mean=reward_sum / num_scored if num_scored else None,
        seconds=dict(seconds),
    )


# -- saved rollouts, scored again


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
