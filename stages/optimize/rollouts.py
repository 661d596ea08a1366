"""Saved rollouts, rewards and logprobs joined into one batch; each rollout that is left out has its reason.

Joins go by `rollout_id`; what has no partner, or belongs to other rollouts, is an error. The reasons, in this order: `abort`
(the engine gave up), `not_scored` (null reward), `small_group` (fewer than two scored), `zero_variance`, `length` (masked),
`empty` (no token).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from schemas.errors import ConfigError, LineageError, NumericError, SchemaError
from stages.common import checkpoints
from stages.common.packed.attention import Sequences, prompt_numbers
from stages.common.ragged import Ragged
from stages.common.store import Store, Version

from . import advantages
from .algorithms import Algorithm, part
from .losses import log_ratio
from .trainer import Batch

if TYPE_CHECKING:
    from .stage import Config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The batch, and what became of every rollout of the dataset."""

    config: Config
    """With what the datasets decided filled in."""
    batch: Batch
    ids: pa.ChunkedArray
    """rollout_id of all rollouts"""
    kept: torch.Tensor
    """[k] int64: which of them are the batch's rows"""
    reasons: list[str | None]
    """for all: why it was dropped, None where it was kept"""
    advantages: torch.Tensor
    """for all: NaN where it was dropped; with a critic, which judges later, the reward"""
    summary: dict[str, Any]
    """for the manifest: counts and means"""


def load(config: Config, algorithm: Algorithm, store: Store, inputs: dict[str, Version]) -> Loaded:
    """Check, join, weigh and filter. LineageError, ConfigError, SchemaError; NumericError when no rollout can have an
    advantage."""
    rollouts = inputs["rollouts"]
    biased = check_lineage(config, store, inputs)
    table = rollouts.table()
    rewards = join(rollouts, table["rollout_id"], inputs["rewards"])
    if not len(table):
        raise _nothing(inputs["rewards"], 0, 0)
    _check_rows(config, table, inputs)
    scores = _reward_tensor(rewards["reward"])
    scores = torch.where(_mask(pc.equal(table["finish_reason"], "abort")), torch.nan, scores)
    groups = group_numbers(table["group_id"])
    shaped = scores
    if config.kl_in_reward and not algorithm.critic:
        shaped = scores - config.kl_coef * _divergence(inputs, table)
    weights = scores if algorithm.critic else part("advantages", algorithm.advantage)(shaped, groups)
    if bool(weights.isnan().all()):
        _require_groups(config.algorithm, groups, int((~scores.isnan()).sum()))
        raise _nothing(inputs["rewards"], len(scores), int((~scores.isnan()).sum()))
    reasons = _reasons(config, table, shaped, groups, weights)
    kept = torch.tensor([i for i, reason in enumerate(reasons) if reason is None], dtype=torch.int64)
    scored = scores[~scores.isnan()].double()
    summary = {
        "reward_mean": float(scored.mean()),
        "reward_std": float(scored.std()) if len(scored) > 1 else 0.0,
        "rollouts": len(scores),
        "kept": len(kept),
        "dropped": dict(sorted(Counter(reason for reason in reasons if reason).items())),
        "zero_advantage": 0 if algorithm.critic else int((weights[kept] == 0).sum()),
        "all_advantages_zero": not (algorithm.critic or bool((weights[kept] != 0).any())),
        "biased_sampling": biased,
    }
    if summary["all_advantages_zero"]:
        log.warning("every advantage is 0 (each group's rewards are equal): there is nothing to learn from these rollouts")
    filled = config.model_copy(update={"max_completion_tokens": _longest(config, rollouts, table)})
    batch = _batch(table, inputs, kept, groups, weights)
    if algorithm.critic:
        cut = _mask(pc.equal(table["finish_reason"], "length"))[kept]
        batch = dataclasses.replace(batch, advantages=torch.full_like(batch.old, torch.nan), rewards=scores[kept], cut=cut)
    return Loaded(filled, batch, table["rollout_id"], kept, reasons, weights, summary)


def check_lineage(config: Config, store: Store, inputs: dict[str, Version]) -> list[str]:
    """Refuse rollouts of a policy that is too old or foreign, rewards of other rollouts, biased sampling.

    Returns the biases of sampling that were allowed.
    """
    policy, rollouts = inputs["policy"], inputs["rollouts"]
    sampled = rollouts.manifest.model("policy")
    allowed = [checkpoints.as_model("policy", version) for version in ancestors(store, policy, config.max_staleness)]
    if sampled is None or sampled.weights not in [model.weights for model in allowed]:
        found = f"{sampled.weights[:12]}… ({sampled.ref})" if sampled else "no policy at all"
        raise LineageError(
            str(rollouts.ref),
            f"sampled by weights {found}, expected {' or '.join(f'{m.weights[:12]}… ({m.ref})' for m in allowed)}; "
            f"optimize.max_staleness is {config.max_staleness}",
            next="generate with the starting checkpoint, start from the one that sampled, or raise optimize.max_staleness",
        )
    for role in ("rewards", "ref", "prox"):
        entry = inputs[role].manifest.input("rollouts") if role in inputs else None
        if role in inputs and (entry is None or entry.content_hash != rollouts.manifest.content_hash):
            made = f"made of {entry.ref if entry else 'no rollouts that its manifest names'}, not of {rollouts.ref}"
            raise LineageError(str(inputs[role].ref), made, next=f"quiver lineage {inputs[role].ref}")
    scored = {model.weights for model in inputs["prox"].manifest.models} if "prox" in inputs else {sampled.weights}
    if scored != {sampled.weights}:
        found = ", ".join(f"{weights[:12]}…" for weights in sorted(scored)) or "no model"
        raise LineageError(
            str(inputs["prox"].ref),
            f"proximal logprobs are those of the policy that sampled, expected weights {sampled.weights[:12]}…, found {found}",
            next=f"score {rollouts.ref} under {sampled.ref}",
        )
    biased = biases(rollouts.manifest.config)
    if biased and not config.allow_biased_sampling:
        raise ConfigError(
            str(rollouts.ref),
            f"sampled with {', '.join(biased)}: its tokens do not follow the policy's own distribution",
            next="generate without truncation and penalties, or set optimize.allow_biased_sampling = true",
        )
    return biased


def ancestors(store: Store, policy: Version, count: int) -> list[Version]:
    """The policy and up to `count` policies that it was made of, newest first."""
    found = [policy]
    while len(found) <= count and (entry := found[-1].manifest.input("policy")) is not None:
        found.append(store.open(entry.ref))
    return found


def biases(config: dict[str, Any]) -> list[str]:
    """The sampling settings of a rollouts manifest that make the sampled distribution another one than the policy's."""
    sampling = {**config, **(config.get("sampling") or {})}
    wrong = {
        "top_p": lambda v: v < 1,
        "top_k": lambda v: v > 0,
        "min_p": lambda v: v > 0,
        "min_tokens": lambda v: v > 0,
        "presence_penalty": lambda v: v != 0,
        "frequency_penalty": lambda v: v != 0,
        "repetition_penalty": lambda v: v != 1,
    }
    return [
        f"{name} = {sampling[name]}" for name, test in wrong.items() if sampling.get(name) is not None and test(sampling[name])
    ]


def join(rollouts: Version, ids: pa.ChunkedArray, other: Version) -> pa.Table:
    """The rows of `other` in the order of `ids`. LineageError unless it names each rollout exactly once, and no other."""
    table = other.table()
    places = pc.index_in(ids, value_set=table["rollout_id"].combine_chunks())
    if places.null_count or len(table) != len(ids):
        missing = ids.filter(pc.is_null(places))
        unknown = table["rollout_id"].filter(pc.invert(pc.is_in(table["rollout_id"], value_set=ids.combine_chunks())))
        problems = [
            f"{len(column)} {what}, such as {column[0].as_py()!r}"
            for what, column in ((f"rollouts of {rollouts.ref} are missing", missing), ("ids are unknown there", unknown))
            if len(column)
        ]
        raise LineageError(str(other.ref), "; ".join(problems), next=f"quiver lineage {other.ref}")
    return table.take(places)


def group_numbers(column: pa.ChunkedArray) -> torch.Tensor:
    """[B] int64: each group id's number, in order of first appearance."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    return torch.from_numpy(np.array(encoded.indices, dtype=np.int64))


def _reward_tensor(column: pa.ChunkedArray) -> torch.Tensor:
    return torch.from_numpy(np.array(column.combine_chunks().fill_null(float("nan")), dtype=np.float32))


def _mask(column: pa.ChunkedArray) -> torch.Tensor:
    return torch.from_numpy(np.array(column.combine_chunks(), dtype=bool))


def _check_rows(config: Config, table: pa.Table, inputs: dict[str, Version]) -> None:
    """Rows that no policy gradient can be taken of, or that the model can not read."""
    name, policy = str(inputs["rollouts"].ref), inputs["policy"]
    greedy = pc.sum(pc.equal(table["temperature"], 0)).as_py() or 0
    if greedy:
        raise ConfigError(
            name,
            f"{greedy} rows were sampled at temperature 0, where no token has a probability",
            next="generate at temperature > 0",
        )
    prompts, completions = (pc.list_value_length(table[column]) for column in ("prompt_ids", "completion_ids"))
    if pc.min(prompts).as_py() == 0:
        raise SchemaError(
            name, "a prompt has no ids, so nothing predicts its completion's first token", next=f"quiver show {name}"
        )
    size, longest = checkpoints.vocabulary_size(policy), checkpoints.context_length(policy)
    for column in ("prompt_ids", "completion_ids"):
        largest = max((pc.max(chunk.flatten()).as_py() or 0 for chunk in table[column].chunks), default=0)
        if largest >= size:
            raise SchemaError(
                name, f"{column} holds {largest}, the policy knows ids below {size}", next=f"quiver lineage {name}"
            )
    if checkpoints.is_encoder_decoder(policy):  # a context each; the value of a cut state needs the last id read as well
        most = max(pc.max(prompts).as_py(), pc.max(completions).as_py() + config.bootstrap_length)
    else:
        most = pc.max(pc.add(prompts, completions)).as_py()
    if longest is not None and most > longest:
        raise SchemaError(name, f"a rollout has {most} tokens, the policy reads {longest}", next=f"quiver show {name}")


def _reasons(config, table, scores, groups, weights) -> list[str | None]:
    equal = advantages.zero_variance(scores, groups) & bool(config.drop_zero_variance)
    tests = (
        ("abort", _mask(pc.equal(table["finish_reason"], "abort"))),
        ("not_scored", scores.isnan()),
        ("small_group", weights.isnan()),
        ("zero_variance", equal),
        ("length", _mask(pc.equal(table["finish_reason"], "length")) & (config.on_length == "mask")),
        ("empty", _mask(pc.equal(pc.list_value_length(table["completion_ids"]), 0))),
    )
    codes = torch.full((len(scores),), len(tests))
    for code in reversed(range(len(tests))):
        codes[tests[code][1]] = code
    names = [*[name for name, _ in tests], None]
    return [names[code] for code in codes.tolist()]


def _require_groups(algorithm: str, groups: torch.Tensor, scored: int) -> None:
    """ConfigError where rollouts are scored, but every prompt has one only."""
    if scored >= 2 and int(groups.bincount().max()) < 2:
        raise ConfigError(
            f"optimize.algorithm {algorithm}",
            f"needs two rollouts of a prompt at least, found one of each of {len(groups)} prompts",
            next="set generate.samples_per_prompt >= 2, or use reinforce_pp or ppo, which need no group",
        )


def _nothing(rewards: Version, count: int, scored: int) -> NumericError:
    return NumericError(
        str(rewards.ref),
        f"{scored} of {count} rollouts are scored, no advantage can be computed of them",
        next=f"look at the errors: quiver show {rewards.ref}; a group algorithm needs two scored rollouts of a prompt",
    )


def _divergence(inputs: dict[str, Version], table: pa.Table) -> torch.Tensor:
    """[B] k1 estimate of the KL to the reference, summed over each rollout: Σ old − ref."""
    old = Ragged.from_arrow(table["old_logprobs"])
    ref = _logprobs(inputs, "ref", table, torch.arange(len(old)))
    return old.with_values(log_ratio(old.values, ref)).segment_sum()


def _longest(config: Config, rollouts: Version, table: pa.Table) -> int:
    """Divisor of aggregation `constant`: given, or what generation allowed, or the longest completion."""
    told = rollouts.manifest.config
    allowed = told.get("max_tokens") or (told.get("sampling") or {}).get("max_tokens")
    longest = pc.max(pc.list_value_length(table["completion_ids"])).as_py()
    return config.max_completion_tokens or allowed or max(longest, 1)


def _batch(
    table: pa.Table, inputs: dict[str, Version], kept: torch.Tensor, groups: torch.Tensor, weights: torch.Tensor
) -> Batch:
    ragged = {name: Ragged.from_arrow(table[name]).take(kept) for name in ("prompt_ids", "completion_ids", "old_logprobs")}
    extra = {role: _logprobs(inputs, role, table, kept) for role in ("ref", "prox")}
    temperature = torch.from_numpy(np.array(table["temperature"].combine_chunks(), dtype=np.float32))[kept]
    chosen = groups[kept].tolist()
    return Batch(
        data=Sequences(ragged["prompt_ids"], ragged["completion_ids"], temperature),
        groups=chosen,
        prompts=prompt_numbers(ragged["prompt_ids"], chosen),
        advantages=weights[kept],
        old=ragged["old_logprobs"].values,
        prox=extra["prox"],
        ref=extra["ref"],
        stale=inputs["rollouts"].manifest.model("policy").weights != checkpoints.as_model("policy", inputs["policy"]).weights,
    )


def _logprobs(inputs: dict[str, Version], role: str, table: pa.Table, kept: torch.Tensor) -> torch.Tensor | None:
    if role not in inputs:
        return None
    other, completions = inputs[role], Ragged.from_arrow(table["completion_ids"])
    told = other.manifest.config.get("role")
    if told is not None and told != role:
        raise LineageError(str(other.ref), f"holds {told} logprobs, expected {role}", next=f"quiver lineage {other.ref}")
    found = Ragged.from_arrow(join(inputs["rollouts"], table["rollout_id"], other)["logprobs"])
    if not torch.equal(found.lengths, completions.lengths):
        raise SchemaError(str(other.ref), "logprobs and completion_ids differ in length", next=f"quiver show {other.ref}")
    return found.take(kept).values
