"""What one version of rollouts must be before it is trained on: of an allowed policy, unbiased,
joined by id.

With several versions each is looked at by itself; what they must be towards each other is that no
rollout stands in two of them. Names, manifests and columns are all that is read here: no torch, no
weights.

    sampled = Sampled({"policy": …, "rollouts": …, "rewards": …})        # one of `inputs.sets`
    check_lineage(config, store, sampled); sampled.column("rewards", "reward")
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version

if TYPE_CHECKING:
    from .config import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """One version of rollouts with what belongs to it."""

    inputs: dict[str, Version]
    """policy, rollouts, rewards and, where given, ref and prox"""

    @property
    def rollouts(self) -> Version:
        """The version itself."""
        return self.inputs["rollouts"]

    @cached_property
    def table(self) -> pa.Table:
        """rollouts/1"""
        return self.rollouts.table()

    @property
    def stale(self) -> bool:
        """Whether another policy than the starting checkpoint sampled them."""
        start = checkpoints.as_model("policy", self.inputs["policy"])
        return self.rollouts.manifest.model("policy").weights != start.weights

    def column(self, role: str, name: str) -> pa.ChunkedArray:
        """Column `name` of the rewards or logprobs, in the order of the rollouts. LineageError."""
        return join(self.rollouts, self.table["rollout_id"], self.inputs[role])[name]


def check_lineage(config: Config, store: Store, own: Sampled) -> list[str]:
    """Refuse rollouts of a policy that is too old or foreign, proximal logprobs of another policy
    than theirs, biased sampling.

    Returns the biases of sampling that were allowed.
    """
    inputs, policy, rollouts = own.inputs, own.inputs["policy"], own.rollouts
    sampled = rollouts.manifest.model("policy")
    allowed = []
    for version in ancestors(store, policy, config.max_staleness):
        allowed.append(checkpoints.as_model("policy", version))
        if sampled and sampled.weights == allowed[-1].weights:
            break
    else:
        found = f"{sampled.weights[:12]}… ({sampled.ref})" if sampled else "no policy at all"
        raise LineageError(
            str(rollouts.ref),
            f"sampled by weights {found}, expected "
            f"{' or '.join(f'{m.weights[:12]}… ({m.ref})' for m in allowed)}; "
            f"optimize.max_staleness is {config.max_staleness}",
            next="generate with the starting checkpoint, start from the one that sampled, or "
            "raise optimize.max_staleness",
        )
    scored = (
        {model.weights for model in inputs["prox"].manifest.models}
        if "prox" in inputs
        else {sampled.weights}
    )
    if scored != {sampled.weights}:
        found = ", ".join(f"{weights[:12]}…" for weights in sorted(scored)) or "no model"
        raise LineageError(
            str(inputs["prox"].ref),
            "proximal logprobs are those of the policy that sampled, expected weights "
            f"{sampled.weights[:12]}…, found {found}",
            next=f"score {rollouts.ref} under {sampled.ref}",
        )
    biased = biases(rollouts.manifest.config)
    if biased and not config.allow_biased_sampling:
        raise ConfigError(
            str(rollouts.ref),
            f"sampled with {', '.join(biased)}: its tokens do not follow the policy's own "
            "distribution",
            next="generate without truncation and penalties, or set "
            "optimize.allow_biased_sampling = true",
        )
    return biased


def check_schedule(config: Config, policy: Version) -> None:
    """ConfigError where every step of this stage would have the learning rate 0; a warning where
    that begins within it."""
    if config.schedule == "constant":
        return
    first, steps = int(policy.manifest.metrics.get("step", 0)), config.epochs * config.minibatches
    if first >= config.total_steps:
        raise ConfigError(
            "optimize.total_steps",
            f"schedule {config.schedule!r} is at learning rate 0 from step {config.total_steps} "
            f"on, {policy.ref} has {first} steps "
            "behind it: nothing would be learned",
            next=f"raise optimize.total_steps above {first + steps - 1}",
        )
    if first + steps > config.total_steps:
        log.warning(
            "optimize.total_steps: the learning rate is 0 from step %d on, and this stage goes "
            "from step %d up to step %d",
            config.total_steps,
            first,
            first + steps - 1,
        )


def ancestors(store: Store, policy: Version, count: int) -> Iterator[Version]:
    """The policy and up to `count` policies that it was made of, newest first; each opened when it
    is asked for, so that one that is gone is an error only to rollouts as old."""
    yield policy
    for _ in range(count):
        entry = policy.manifest.input("policy")
        if entry is None:
            return
        policy = store.open(entry.ref)
        yield policy


def biases(config: dict[str, Any]) -> list[str]:
    """The sampling settings of a rollouts manifest that make the sampled distribution another one
    than the policy's."""
    sampling = {**config, **(config.get("sampling") or {})}
    neutral = {
        "top_p": [1],
        "top_k": [0, -1],
        "min_p": [0],
        "min_tokens": [0],
        "presence_penalty": [0],
        "frequency_penalty": [0],
        "repetition_penalty": [1],
    }
    return [
        f"{name} = {sampling[name]}"
        for name, values in neutral.items()
        if sampling.get(name) not in (None, *values)
    ]


def join(rollouts: Version, ids: pa.ChunkedArray, other: Version) -> pa.Table:
    """The rows of `other` in the order of `ids`. LineageError unless it names each rollout exactly
    once, and no other."""
    table = other.table()
    places = pc.index_in(ids, value_set=table["rollout_id"].combine_chunks())
    if places.null_count or len(table) != len(ids):
        missing = ids.filter(pc.is_null(places))
        unknown = table["rollout_id"].filter(
            pc.invert(pc.is_in(table["rollout_id"], value_set=ids.combine_chunks()))
        )
        problems = [
            f"{len(column)} {what}, such as {column[0].as_py()!r}"
            for what, column in (
                (f"rollouts of {rollouts.ref} are missing", missing),
                ("ids are unknown there", unknown),
            )
            if len(column)
        ]
        raise LineageError(str(other.ref), "; ".join(problems), next=f"score {rollouts.ref} again")
    return table.take(places)


def require_own_ids(versions: Sequence[Sampled]) -> None:
    """No rollout stands in two versions: the same generation done again makes the same ids."""
    for one, other in itertools.combinations(versions, 2):
        ids = one.table["rollout_id"]
        both = ids.filter(pc.is_in(ids, value_set=other.table["rollout_id"].combine_chunks()))
        if len(both):
            what = (
                f"{len(both)} rollout ids stand in {other.rollouts.ref} too, such as "
                f"{both[0].as_py()!r}"
            )
            raise LineageError(
                str(one.rollouts.ref),
                what,
                next=f"name {one.rollouts.ref} or {other.rollouts.ref}, not both",
            )
