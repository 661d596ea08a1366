"""The input versions of optimize, grouped into one set for each version of rollouts.

Replay trains on several versions at once, each sampled by its own policy. Rewards and logprobs are
matched to rollouts by the content hash in their manifests, never by position. Refused: the same
rollouts twice, rewards or logprobs of other rollouts or twice of the same, rollouts without them,
and logprobs of more than one reference.

    rewards = ["a/rewards@2", "a/rewards@3"]
    rollouts = ["a/rollouts@3", "a/rollouts@2"]
    inputs = open_inputs(store, "a/policy@2", rollouts, {"rewards": rewards})
    list(inputs)    # policy, rollouts, rollouts.2, rewards, rewards.2: the roles in the manifest
    rollout_set = RolloutSet(sets(inputs)[1])           # a/rollouts@2 and what belongs to it
    rollout_set.column("rewards", "reward")             # of a/rewards@2, in the rollouts' order
    turn_rewards(rollout_set)                           # [B] list<float32>
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rollouts as rollouts_kind
from quiver.schemas.errors import ConfigError, LineageError, SchemaError, printable
from quiver.schemas.refs import Ref
from quiver.stages.core.config import parse
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.versions import OPTIMIZER_FOLDER
from quiver.stages.model import checkpoints

from .config import Config, Lora

log = logging.getLogger(__name__)

GivenRefs = str | Ref | list[str | Ref]
"""One version, or several."""
_HOW_TO_MAKE = {
    "rewards": "quiver reward RECIPE --rollouts {}",
    "ref": "quiver logprobs RECIPE --rollouts {}",
    "prox": "compute those of {} under the policy that optimize.prox_of names",
}
_NAMES = {
    "rewards": "rewards",
    "ref": "reference logprobs",
    "prox": "proximal logprobs",
}


def open_inputs(
    store: Store,
    policy: str | Ref,
    rollouts: GivenRefs,
    beside: Mapping[str, GivenRefs | None],
) -> dict[str, Version]:
    """Open all versions, by role. `beside`: references by role (rewards, ref, prox) of the versions
    that belong to the rollouts. Raises ConfigError, LineageError."""
    rollouts_by_content: dict[str, Version] = {}
    for version in map(store.open, _as_list(rollouts)):
        equal = rollouts_by_content.setdefault(version.manifest.content_hash, version)
        if equal is not version:
            is_same = equal.ref == version.ref
            problem = "is given twice" if is_same else f"holds the same rows as {equal.ref}"
            raise ConfigError(str(version.ref), problem, next="name each version of rollouts once")
    if not rollouts_by_content:
        raise ConfigError("optimize", "no rollouts are given", next="name a version of rollouts")
    inputs = {
        "policy": store.open(policy),
        **_numbered("rollouts", rollouts_by_content.values()),
    }
    for role, refs in beside.items():
        versions = [store.open(ref) for ref in _as_list(refs)]
        if versions or role == "rewards":
            ordered = _in_order_of(rollouts_by_content, role, versions)
            inputs |= _numbered(role, ordered)
            if role == "ref":
                _require_one_reference(ordered)
    return inputs


def require_optimizer_state(config: Config, inputs: Mapping[str, Version]) -> None:
    """Raise LineageError if the optimizer state of the policy expired."""
    policy = inputs["policy"]
    try:
        policy.require(f"{OPTIMIZER_FOLDER}/state.json")
    except LineageError as error:
        error.message += "; optimize.load_optimizer = false starts with a new one"
        names = [f"--rollouts {version['rollouts'].ref}" for version in sets(inputs)]
        settings = [f"--set {setting}" for setting in config.without_moments()]
        error.next = " ".join(
            ["quiver optimize RECIPE --policy", str(policy.ref), *names, *settings]
        )
        raise


def sets(inputs: Mapping[str, Version]) -> list[dict[str, Version]]:
    """Return one set for each version of rollouts: the policy, the rollouts and the versions that
    belong to them, by plain roles."""
    sets_by_number: dict[str, dict[str, Version]] = {}
    for name, version in inputs.items():
        role, _, number = name.partition(".")
        sets_by_number.setdefault(number, {"policy": inputs["policy"]})[role] = version
    return list(sets_by_number.values())


def _as_list(refs: GivenRefs | None) -> list[str | Ref]:
    if refs is None:
        return []
    return refs if isinstance(refs, list) else [refs]


def _numbered(role: str, versions: Iterable[Version]) -> dict[str, Version]:
    """Return the versions by role: `rollouts`, `rollouts.2`, `rollouts.3`, …"""
    return {
        f"{role}.{number}" if number > 1 else role: version
        for number, version in enumerate(versions, 1)
    }


def _in_order_of(
    rollouts: Mapping[str, Version], role: str, versions: list[Version]
) -> list[Version]:
    """Return `versions` in the order of their rollouts, which are keyed by content hash. Raises
    LineageError or ConfigError unless each of the rollouts has exactly one."""
    versions_by_content: dict[str, Version] = {}
    for version in versions:
        source = version.manifest.input("rollouts")
        if source is None or source.content_hash not in rollouts:
            source_name = source.ref if source else "no rollouts"
            expected = " or ".join(str(sampled.ref) for sampled in rollouts.values())
            raise LineageError(
                str(version.ref),
                f"was made of {source_name}, not of {expected}",
                next=f"name {_NAMES[role]} of {expected}",
            )
        equal = versions_by_content.setdefault(source.content_hash, version)
        if equal is not version:
            raise ConfigError(
                str(version.ref),
                f"{_NAMES[role]} of {rollouts[source.content_hash].ref}, and so is {equal.ref}",
                next="name one of them",
            )
    for content, sampled in rollouts.items():
        if content not in versions_by_content:
            names = ", ".join(str(version.ref) for version in versions) or "none"
            raise LineageError(
                str(sampled.ref),
                f"no {_NAMES[role]} of these rollouts are given, found {names}",
                next=_HOW_TO_MAKE[role].format(sampled.ref),
            )
    return [versions_by_content[content] for content in rollouts]


def _require_one_reference(versions: list[Version]) -> None:
    """Raise LineageError unless all logprobs are of one reference: the KL term needs a single one,
    even with several sampling policies."""
    models = [version.manifest.model("ref") for version in versions]
    unknown = "an unnamed model"
    for version, model in zip(versions, models, strict=True):
        if (model and model.weights) != (models[0] and models[0].weights):
            raise LineageError(
                str(version.ref),
                f"its logprobs are under {model.ref if model else unknown}, but "
                f"{versions[0].ref}'s are under {models[0].ref if models[0] else unknown}",
                next=f"compute those of {version.ref} under the same reference (stage logprobs)",
            )


# -- adapters


def with_base(config: Lora | None, store: Store, inputs: dict[str, Version]) -> dict[str, Version]:
    """Return the stage's inputs and, if adapters are trained, the policy with the frozen weights
    under role `base`.

    Raises:
        ConfigError: the starting policy's adapter differs from `config`.
        LineageError: its base is gone or changed.
    """
    if config is None:
        return inputs
    policy = inputs["policy"]
    base = checkpoints.adapter_base(store, policy)
    if base is None:
        return {"base": policy, **inputs}
    saved = parse(Lora, policy.manifest.config_section("lora"), f"{policy.ref} lora")
    for_life = [name for name in Lora.model_fields if name != "save"]
    changed = [name for name in for_life if _comparable(config, name) != _comparable(saved, name)]
    if changed:
        expected = ", ".join(f"{name} = {getattr(saved, name)}" for name in changed)
        asked = ", ".join(f"{name} = {getattr(config, name)}" for name in changed)
        raise ConfigError(
            f"optimize.lora {policy.ref}",
            f"its adapter has {expected}, the recipe asks for {asked}",
            next="set the same in the recipe"
            + (
                ", or continue with optimize.lora.save = 'merged', and start a new adapter from "
                "that policy"
                if checkpoints.is_adapter_alone(policy)
                else f", or start a new run with policy.model = {str(policy.files.folder)!r}"
            ),
        )
    return {"base": base, **inputs}


def _comparable(config: Lora, name: str) -> Any:
    """Return a field of adapters; the order of layers, and one named twice, make no difference."""
    value = getattr(config, name)
    return set(value) if isinstance(value, list) else value


def has_optimizer_state(config: Lora | None, policy: Version) -> bool:
    """Return True if `policy` holds optimizer state for the weights trained now, adapters or whole
    weights."""
    if f"{OPTIMIZER_FOLDER}/state.json" not in policy.files.names:
        return False
    trained = ["whole weights", "adapters"]
    had_adapters = policy.manifest.input("base") is not None
    has_adapters = config is not None
    if had_adapters != has_adapters:
        log.warning(
            "%s was trained by %s, now it is %s: the moments start from zero",
            policy.ref,
            trained[had_adapters],
            trained[has_adapters],
        )
    return had_adapters == has_adapters


# -- one version of rollouts


@dataclass(frozen=True)
class RolloutSet:
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
        start = checkpoints.model_entry("policy", self.inputs["policy"])
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
                next=f"make the {_NAMES[role]} of {self.rollouts.ref} again",
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


def require_own_ids(versions: Sequence[RolloutSet]) -> None:
    """Raise LineageError if a rollout is in two versions: repeating a generation gives the same
    ids."""
    for one, other in itertools.combinations(versions, 2):
        ids = one.table["rollout_id"]
        both = ids.filter(pc.is_in(ids, value_set=other.table["rollout_id"].combine_chunks()))
        if len(both):
            raise LineageError(
                str(one.rollouts.ref),
                f"{len(both)} rollout ids are also in {other.rollouts.ref}, such as "
                f"{both[0].as_py()!r}",
                next=f"name {one.rollouts.ref} or {other.rollouts.ref}, not both",
            )


def with_turns(table: pa.Table) -> pa.Table:
    """Return `table` of rollouts with a column `turns`. If it had none, the column is null, which
    means one turn."""
    if "turns" in table.column_names:
        return table
    kind = rollouts_kind.OF_TURNS.field("turns").type
    return table.append_column("turns", pa.nulls(len(table), kind))


def turn_rewards(version: RolloutSet) -> pa.ListArray:
    """Return [B] list<float32>: the reward of each turn of each rollout, 0 for a turn without one;
    NaN for every turn of a rollout that is not scored, or that the engine gave up. Raises
    SchemaError unless each scored rollout has one reward for each turn."""
    table = with_turns(version.table)
    counts = np.array(pc.list_value_length(table["turns"]).fill_null(1), dtype=np.int64)
    column = version.column("rewards", "turn_rewards")
    is_scored = pc.and_(
        version.column("rewards", "reward").is_valid(),
        pc.not_equal(table["finish_reason"], "abort"),
    )
    lengths = np.array(pc.list_value_length(column).fill_null(0), dtype=np.int64)
    differs = np.flatnonzero(np.array(is_scored) & (lengths != counts))
    if len(differs):
        row = int(differs[0])
        raise SchemaError(
            str(version.inputs["rewards"].ref),
            f"{len(differs)} scored rollouts do not have one turn reward per turn, such as "
            f"{printable(table['rollout_id'][row].as_py())}: it has {counts[row]} turns, found "
            f"{lengths[row]} turn_rewards",
            next=f"score {version.rollouts.ref} again",
        )
    values = np.full(counts.sum(), np.nan, np.float32)
    earned = pc.list_flatten(column.filter(is_scored)).fill_null(0.0)
    values[np.repeat(np.array(is_scored), counts)] = np.array(earned)
    offsets = np.append(0, counts.cumsum()).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def steered(config: Config, policy: Version) -> Config:
    """Return `config` with the coefficients that follow a target as the last training left them.
    Logs them, and warns of those that the recipe has changed since, without effect."""
    changed = config.with_steered(policy.manifest.metrics)
    for name in config.steered:
        asked, start = getattr(config, name), getattr(changed, name)
        log.info("optimize.%s starts at %g", name, start)
        before = policy.manifest.config.get(name)
        if name in policy.manifest.metrics and asked != before:
            log.warning(
                "optimize.%s = %g has no effect: this training goes on with %g, where %s left it "
                "(it was %s there); to begin with another value, start a new run from that policy",
                name,
                asked,
                start,
                policy.ref,
                before,
            )
    return changed
