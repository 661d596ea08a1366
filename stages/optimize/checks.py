"""Checks of one version of rollouts before it is trained on: sampled by an allowed policy,
unbiased, joined by id.

Several versions are checked one by one; between them, no rollout may be in two. Only names,
manifests and columns are read here: no torch, no weights.

    sampled = Sampled({"policy": …, "rollouts": …, "rewards": …})        # one of `inputs.sets`
    check_lineage(config, store, sampled); sampled.column("rewards", "reward")

Not of the spine: it says what is refused, and nothing of how training goes.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import fields, rewards
from quiver.schemas.errors import ConfigError, LineageError, did_you_mean, printable
from quiver.schemas.manifest import Model, line_of
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version

if TYPE_CHECKING:
    from .config import Config

_TRACKERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    **{
        name: (name,)
        for name in (
            "aim",
            "clearml",
            "comet_ml",
            "dvclive",
            "mlflow",
            "swanlab",
            "trackio",
            "wandb",
        )
    },
}
"""Packages by the name of accelerate's tracker, which needs any one of them."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sampled:
    """One version of rollouts with the versions that belong to it."""

    inputs: dict[str, Version]
    """policy, rollouts, rewards and, if given, ref and prox."""

    @property
    def rollouts(self) -> Version:
        """The version of rollouts."""
        return self.inputs["rollouts"]

    @cached_property
    def table(self) -> pa.Table:
        """rollouts/1"""
        return self.rollouts.table()

    @property
    def stale(self) -> bool:
        """True if they were sampled by a policy other than the starting checkpoint."""
        start = checkpoints.as_model("policy", self.inputs["policy"])
        return self.rollouts.manifest.require_model("policy").weights != start.weights

    def column(self, role: str, name: str) -> pa.ChunkedArray:
        """Return column `name` of the rewards or logprobs, in the order of the rollouts and in
        their chunks. Raises LineageError unless they name each rollout exactly once, and no
        other."""
        ids = self.table["rollout_id"]
        table = self.inputs[role].table()
        places = pc.index_in(ids, value_set=table["rollout_id"].combine_chunks())
        if places.null_count or len(table) != len(ids):
            missing = ids.filter(pc.is_null(places))
            is_known = pc.is_in(table["rollout_id"], value_set=ids.combine_chunks())
            unknown = table["rollout_id"].filter(pc.invert(is_known))
            problems = [
                f"{len(column)} {problem}, such as {column[0].as_py()!r}"
                for problem, column in (
                    (f"rollouts of {self.rollouts.ref} are missing", missing),
                    ("ids are unknown there", unknown),
                )
                if len(column)
            ]
            raise LineageError(
                str(self.inputs[role].ref),
                "; ".join(problems),
                next=f"score {self.rollouts.ref} again",
            )
        # Arrow's own `take` joins all chunks first, and their lists may have at most 2^31 items
        # together; rows that are already in order are not copied
        column = table[name]
        chunks = []
        row = 0
        for chunk in ids.chunks:
            rows = places.slice(row, len(chunk)).to_numpy()
            row += len(chunk)
            starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)  # each run of consecutive rows
            lengths = np.diff(starts, append=len(rows))
            runs = [column.slice(rows[at], n) for at, n in zip(starts, lengths, strict=True)]
            arrays = [array for run in runs for array in run.chunks]
            chunks += [pa.concat_arrays(arrays)] if len(arrays) > 1 else arrays
        return pa.chunked_array(chunks, column.type)


def check_lineage(config: Config, store: Store, version: Sampled) -> list[str]:
    """Check which policy sampled the rollouts, and how.

    Refuses rollouts of a foreign or too old policy, proximal logprobs of a policy other than
    `prox_of` requires, and biased sampling that is not allowed or lacks proximal logprobs. Raises
    LineageError, ConfigError.

    Returns the biases of sampling that were allowed.
    """
    rollouts = version.rollouts
    sampler = rollouts.manifest.model("policy")
    weights = sampler.weights if sampler else None
    allowed: list[Model] = []
    # a missing ancestor is an error only for rollouts that old
    policy = version.inputs["policy"].manifest
    with_expired = store.with_expired()  # a manifest is enough
    for manifest in line_of(policy, lambda ref: with_expired.open(ref).manifest):
        allowed.append(checkpoints.as_model("policy", with_expired.open(manifest.ref)))
        if weights == allowed[-1].weights or len(allowed) > config.max_staleness:
            break
    if weights != allowed[-1].weights:
        found = f"{weights[:12]}… ({sampler.ref})" if sampler else "no policy at all"
        raise LineageError(
            str(rollouts.ref),
            f"sampled by weights {found}, expected "
            f"{' or '.join(f'{m.weights[:12]}… ({m.ref})' for m in allowed)}; "
            f"optimize.max_staleness is {config.max_staleness}",
            next="generate with the starting checkpoint, start from the one that sampled, or "
            "raise optimize.max_staleness",
        )
    for part in ("tokenizer", "template"):
        if getattr(sampler, part) not in ("", getattr(allowed[-1], part)):
            raise LineageError(
                str(rollouts.ref),
                f"sampled by {sampler.ref}, whose {part} is another than that of {allowed[-1].ref}",
                next="generate with the starting checkpoint, or start from the one that sampled",
            )
    prox = version.inputs.get("prox")
    if prox is not None:
        _check_prox(config, version, prox)
    elif config.prox_of == "start":
        raise ConfigError(
            "optimize.prox_of",
            f"'start' needs proximal logprobs, none are given of {rollouts.ref}",
            next=f"score {rollouts.ref} under {version.inputs['policy'].ref} (stage logprobs, role "
            "prox), or take 'behaviour'",
        )
    biased = biases(rollouts.manifest.config_section("sampling"))
    if biased and not config.allow_biased_sampling:
        raise ConfigError(
            str(rollouts.ref),
            f"sampled with {', '.join(biased)}: its tokens do not follow the policy's own "
            "distribution",
            next="generate without truncation and penalties, or set "
            "optimize.allow_biased_sampling = true",
        )
    if biased and prox is None:
        raise ConfigError(
            str(rollouts.ref),
            f"sampled with {', '.join(biased)}: the ratio to the engine's logprobs is not 1 even "
            "before the first step, and no proximal logprobs are given",
            next=f"score {rollouts.ref} under the policy that sampled it (stage logprobs, role "
            "prox), as a recipe does by itself",
        )
    return biased


def _check_prox(config: Config, version: Sampled, prox: Version) -> None:
    """Raise LineageError if the proximal logprobs are of a policy other than `prox_of` requires."""
    if config.prox_of == "start":
        policy = checkpoints.as_model("policy", version.inputs["policy"])
        description = "this training starts from"
    else:
        policy = version.rollouts.manifest.require_model("policy")
        description = "sampled"
    scored_by = {model.weights for model in prox.manifest.models}
    if scored_by != {policy.weights}:
        found = ", ".join(f"{other[:12]}…" for other in sorted(scored_by)) or "no model"
        raise LineageError(
            str(prox.ref),
            f"proximal logprobs are those of the policy that {description}, expected weights "
            f"{policy.weights[:12]}…, found {found}; optimize.prox_of is {config.prox_of!r}",
            next=f"score {version.rollouts.ref} under {policy.ref}",
        )


def check_credit(config: Config, inputs: Mapping[str, Version]) -> None:
    """Raise ConfigError if `credit` needs the rewards of turns, and a version of rewards has
    none."""
    if config.credit == "rollout":
        return
    for role, version in inputs.items():
        has_turns = version.manifest.kind_schema == fields.kind_of(rewards.OF_TURNS)
        if role.partition(".")[0] == "rewards" and not has_turns:
            raise ConfigError(
                f"optimize.credit {config.credit}",
                f"needs rewards of turns, and {version.ref} has none",
                next='score the rollouts with a reward function whose use is "environment", or set '
                'optimize.credit = "rollout"',
            )


def check_schedule(config: Config, policy: Version) -> None:
    """Raise ConfigError if every step of this stage would have learning rate 0; warn if only the
    last ones would."""
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


def biases(sampling: dict[str, Any]) -> list[str]:
    """Return the sampling settings that make the sampled distribution differ from the policy's."""
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
        f"{name} = {printable(sampling[name])}"
        for name, values in neutral.items()
        if sampling.get(name) not in (None, *values)
    ]


def require_own_ids(versions: Sequence[Sampled]) -> None:
    """Raise LineageError if a rollout is in two versions: repeating a generation gives the same
    ids."""
    for one, other in itertools.combinations(versions, 2):
        ids = one.table["rollout_id"]
        both = ids.filter(pc.is_in(ids, value_set=other.table["rollout_id"].combine_chunks()))
        if len(both):
            raise LineageError(
                str(one.rollouts.ref),
                f"{len(both)} rollout ids stand in {other.rollouts.ref} too, such as "
                f"{both[0].as_py()!r}",
                next=f"name {one.rollouts.ref} or {other.rollouts.ref}, not both",
            )


def check_trackers(trackers: Sequence[str], folder: str | None) -> None:
    """Raise ConfigError for a tracker that accelerate does not know or that is not installed, and
    for a `folder` that is a file."""
    for name in trackers:
        if name not in _TRACKERS:
            raise ConfigError(
                f"optimize.trackers {printable(repr(name))}",
                f"accelerate has no such tracker; it has {', '.join(_TRACKERS)}"
                f"{did_you_mean(name, _TRACKERS)}",
                next="correct optimize.trackers",
            )
        if not any(map(importlib.util.find_spec, _TRACKERS[name])):
            raise ConfigError(
                f"optimize.trackers {name}",
                f"{name} is not installed here",
                next=f"pip install {_TRACKERS[name][0]}",
            )
    if trackers and Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(
            f"optimize.tracker_folder {printable(folder)}",
            "is a file, not a folder",
            next="name another folder in optimize.tracker_folder",
        )
