"""Saved rollouts, rewards and logprobs, joined into one batch with advantages.

The advantages are computed here by the functions of advantages.py, and rollouts are dropped and
counted, each with its reason. Joins use `rollout_id`; a row without a partner, or with a partner
from other rollouts, is an error. Several versions of rollouts are checked and joined one by one,
each row keeps its own old logprobs and temperature, and groups never mix: the same prompt in two
versions is two groups, because different policies answered it.

The reasons, in this order: `abort` (the engine gave up), `not_scored` (null reward), `small_group`
(fewer than two scored), `zero_variance`, `length` (masked), `empty` (no token).

    loaded = load(config, algorithm, store, {"policy": …, "rollouts": …, "rewards": …})
    loaded.batch; loaded.reasons; loaded.summary["dropped"]

Not of the spine: `stage` calls `load` once, and `batch` and `objective` list what comes out.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from quiver.schemas.errors import ConfigError, LineageError, NumericError, SchemaError, printable
from quiver.stages.core.store import Store, Version
from quiver.stages.model.forward.layout import Sequences, prompt_numbers
from quiver.stages.model.forward.media import Media, join_media
from quiver.stages.model.loading import check_rows
from quiver.stages.model.media.dataset import load_media
from quiver.stages.model.ragged import Mapped, Ragged
from quiver.stages.model.turns import Turns
from quiver.stages.turns.statistics import first_failure, way_to_end

from . import terms
from .advantages import group_centered, zero_variance
from .algorithms import Algorithm, find_function
from .batch import Batch, Origin
from .checks import biases, check_lineage, quantization
from .config import Config
from .contract import ADVANTAGE_COLUMNS
from .inputs import RolloutSet, require_own_ids, sets, turn_rewards, with_turns
from .losses import log_ratio

SCORERS = ("functions", "models", "servers")
"""Keys of the rewards' config under which the scorers of the parts are listed."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """The batch, and what happened to every rollout of the dataset."""

    batch: Batch
    ids: pa.ChunkedArray
    """rollout_id of all rollouts, version after version"""
    rows: Tensor
    """[k] int64: indices of the batch's rollouts among all."""
    reasons: list[str | None]
    """For each rollout, why it was dropped; None if it was kept."""
    summary: dict[str, Any]
    """Counts and means for the manifest."""

    def batch_ids(self) -> pa.Array:
        """Return the rollout_id [k] of the batch's rollouts, in its order."""
        return self.ids.combine_chunks().take(pa.array(self.rows.numpy()))


@dataclass(frozen=True)
class _Joined:
    """The B rollouts of all versions, version after version."""

    versions: list[RolloutSet]
    origins: list[Origin]
    """[B] how each was sampled."""
    table: pa.Table
    """rollouts/1, or rollouts/2 if any version is, with the logprobs `ref` and `prox` if given."""
    rewards: Tensor
    """[B] float32; NaN if not scored, or if the engine gave up."""
    groups: Tensor
    """[B] int64, numbered in order of first appearance; versions share no group."""
    turns: Turns | None
    """None unless rollouts have several turns, or turns have rewards."""
    media: Media | None
    """Pictures in the prompts, if there are any."""
    turn_rewards: Ragged | None
    """[B rows] float32: one for each turn; NaN as in `rewards`. None if they are not used."""


def load(
    config: Config, algorithm: Algorithm, store: Store, inputs: Mapping[str, Version]
) -> Loaded:
    """Check, join, compute advantages and filter.

    Raises LineageError, ConfigError, SchemaError; NumericError if no rollout can have an advantage.
    """
    versions = [RolloutSet(version_inputs) for version_inputs in sets(inputs)]
    allowed_biases = [b for version in versions for b in check_lineage(config, store, version)]
    joined = _join(config, store, versions)
    shaped_rewards, advantages, turn_advantages = _advantages_of(config, algorithm, joined)
    reasons = _drop_reasons(config, algorithm, joined, shaped_rewards, advantages)
    is_kept = torch.tensor([reason is None for reason in reasons], dtype=torch.bool)
    is_masked = torch.tensor([reason == "length" for reason in reasons], dtype=torch.bool)
    is_masked &= _lengths(joined.table) > 0
    is_masked &= config.mask_counted
    rows = (is_kept | is_masked).nonzero()[:, 0]
    batch = _make_batch(config, algorithm, joined, rows, advantages, is_masked)
    if turn_advantages is not None:
        lengths = batch.sequences.turns.lengths.values
        of_tokens = turn_advantages.take(rows).values.repeat_interleave(lengths)
        batch = replace(batch, advantages=of_tokens)
    num_kept = int(is_kept.sum())
    reward_moments = None
    if config.reward_scaling == "running":
        before = inputs["policy"].manifest.metrics.get("reward_moments")
        reward_moments = terms.reward_moments(before, joined.rewards)
        batch = replace(batch, reward_scale=terms.reward_scale(reward_moments))
    is_known = algorithm.advantage_of != "tokens"
    num_idle = int((advantages[is_kept] == 0).sum()) if is_known else 0
    all_zero = num_idle == num_kept
    other_terms = config.terms_beside_rewards() if all_zero and num_kept else []
    if "nll_coef" in other_terms and not (batch.rewards >= config.nll_reward).any():
        other_terms.remove("nll_coef")  # no answer has a reward high enough for the NLL term
    summary = {
        **_summarize(joined, reasons),
        "zero_advantage": num_idle,
        "all_advantages_zero": all_zero,
        **({"trained_by": other_terms} if other_terms else {}),
        "biased_sampling": list(dict.fromkeys(allowed_biases)),
        **({"reward_moments": reward_moments} if reward_moments else {}),
    }
    if not num_kept:
        dropped = ", ".join(f"{reason}: {n}" for reason, n in summary["dropped"].items())
        log.warning(
            "no rollout is left to learn from (%s): there is nothing to learn, the weights stay",
            dropped,
        )
    elif other_terms:
        log.warning(
            "each group's rewards are equal: they teach nothing, only %s can train",
            " and ".join(f"optimize.{term}" for term in other_terms),
        )
    elif all_zero:
        log.warning(
            "every advantage is 0 (each group's rewards are equal): there is nothing to learn from "
            "these rollouts"
        )
    return Loaded(batch, joined.table["rollout_id"], rows, reasons, summary)


def _join(config: Config, store: Store, versions: list[RolloutSet]) -> _Joined:
    """Join rewards and logprobs to their rollouts, and check that the policy can read these."""
    rewards = torch.cat([_tensor(v.column("rewards", "reward"), np.float32) for v in versions])
    require_own_ids(versions)
    groups = []
    origins: list[Origin] = []
    tables = []
    num_groups = 0
    for version in versions:
        table = version.table
        name = str(version.rollouts.ref)
        policy = version.inputs["policy"]
        check_rows(table, name, policy, with_next_state=config.bootstrap_length)
        encoded = pc.dictionary_encode(table["group_id"].combine_chunks())
        groups.append(torch.from_numpy(np.array(encoded.indices, np.int64)) + num_groups)
        num_groups += len(encoded.dictionary)
        manifest = version.rollouts.manifest
        biases_text = ", ".join(biases(manifest.config_section("sampling")))
        rounding = quantization(manifest.config_section("options"))
        origins += [Origin(version.stale, biases_text, rounding)] * len(table)
        for role in ("ref", "prox"):
            if role in version.inputs:
                table = table.append_column(role, _logprobs(version, role))
        if config.credit != "rollout":
            table = with_turns(table).append_column("turn_rewards", turn_rewards(version))
        tables.append(table)
    table = pa.concat_tables(tables, promote_options="default")  # absent columns become null
    rewards = torch.where(_ended_by(table, "abort"), torch.nan, rewards)
    return _Joined(
        versions,
        origins,
        table,
        rewards,
        torch.cat(groups),
        Turns.of_table(table, _lengths(table)),
        join_media(
            [
                (load_media(store, v.rollouts, v.table, v.inputs["policy"]), len(v.table))
                for v in versions
            ]
        ),
        Ragged.from_arrow(table["turn_rewards"]) if config.credit != "rollout" else None,
    )


def _logprobs(version: RolloutSet, role: str) -> pa.ChunkedArray:
    """Return the logprobs of this role for the rollouts of `version`."""
    source = version.inputs[role]
    saved_role = source.manifest.config.get("role")
    if saved_role not in (None, role):
        raise LineageError(
            str(source.ref),
            f"holds {printable(saved_role)} logprobs, expected {role}",
            next=f"name {role} logprobs",
        )
    logprobs = version.column(role, "logprobs")
    completions = version.table["completion_ids"]
    if pc.list_value_length(logprobs) != pc.list_value_length(completions):
        raise SchemaError(
            str(source.ref),
            "logprobs and completion_ids differ in length",
            next=f"make the logprobs of {version.rollouts.ref} again",
        )
    return logprobs


def _advantages_of(
    config: Config, algorithm: Algorithm, joined: _Joined
) -> tuple[Tensor, Tensor, Ragged | None]:
    """Return shaped rewards and advantages, [B] each, and the advantages of turns [B rows], if they
    have any.

    For advantages of rollouts, the shaped rewards subtract the KL in the reward, Σ old − ref over
    each rollout. Advantages are NaN for rollouts without one. For advantages of turns, the second
    result is the sum of their absolute values. For advantages of tokens, which are computed later,
    it is the rewards or, if they compare groups, the centered rewards.
    """
    rewards = joined.rewards
    advantages = rewards
    turn_advantages = None
    function = find_function("advantages", algorithm.advantage)
    parameters = inspect.signature(function).parameters
    least = config.least_of(algorithm.advantage)
    if algorithm.advantage_of == "turns":
        earned = joined.turn_rewards
        turn_advantages = earned.with_values(function(earned.values, earned.offsets, joined.groups))
        sizes = turn_advantages.with_values(turn_advantages.values.abs())
        advantages = sizes.segment_sum()
    elif algorithm.advantage_of == "rollouts":
        if config.kl_in_reward:
            old = Ragged.from_arrow(joined.table["old_logprobs"])
            token_kl = log_ratio(old.values, Ragged.from_arrow(joined.table["ref"]).values)
            rewards = rewards - config.kl_coef * old.with_values(token_kl).segment_sum()
        columns = {"lengths": _lengths(joined.table)}
        if {"parts", "part_weights"} & set(parameters):
            columns |= _parts(config, joined.versions)
        columns = {name: columns[name] for name in ADVANTAGE_COLUMNS if name in parameters}
        advantages = function(rewards, joined.groups, **columns, **config.advantage_options())
    elif "groups" in parameters:
        # only shows which rollouts can have one; the advantages of tokens come later
        advantages = group_centered(rewards, joined.groups)
        least = 2
    if not bool(advantages.isnan().all()):
        return rewards, advantages, turn_advantages
    raise _no_advantage(config, algorithm, joined, least)


def _no_advantage(
    config: Config, algorithm: Algorithm, joined: _Joined, least: int
) -> ConfigError | NumericError:
    """Return the error that no rollout has an advantage: it needs `least` of a prompt, which were
    not sampled or not scored, or it gave none."""
    name = "its advantage" if callable(algorithm.advantage) else algorithm.advantage
    groups, unit = joined.groups, "a prompt"
    advice = "use reinforce_pp or ppo, which need no group"
    if algorithm.advantage == "pass_at_k":
        name, advice = f"pass_at_k with k = {least - 1}", "lower optimize.pass_k"
    advice = f"set generate.samples_per_prompt >= {least}, or {advice}"
    if algorithm.advantage == "batch_normalized":
        least, groups, unit = 2, torch.zeros_like(groups), "in all"
        advice = "train on more rollouts: raise generate.samples_per_prompt, or take more prompts"
    is_scored = ~joined.rewards.isnan()
    num_scored = int(is_scored.sum())
    largest, most = (
        max(found.bincount().tolist(), default=0) for found in (groups, groups[is_scored])
    )
    need = f"{name} needs {least} scored rollout{'s' * (least > 1)} {unit}, found {most}"
    if not num_scored or most < least <= largest:
        return _too_few_scored(joined, is_scored, need)
    if least <= most:
        need = f"{name} gave no number for {num_scored} scored rollouts, at most {most} {unit}"
        advice = f"quiver show {joined.versions[0].inputs['rewards'].ref}"
        if callable(algorithm.advantage):
            advice = (
                "correct the function, or raise generate.samples_per_prompt if it compares them"
            )
    return ConfigError(f"optimize.algorithm {config.algorithm}", need, next=advice)


def _too_few_scored(joined: _Joined, is_scored: Tensor, need: str) -> NumericError:
    """Return the error that too few rollouts are scored, with the reasons why the others ended.
    `need`: how many the advantage needs."""
    names = [str(version.inputs["rewards"].ref) for version in joined.versions]
    table, failure, longest = joined.table.filter(pa.array(~is_scored.numpy())), None, None
    reasons = table["finish_reason"]
    if "end_reason" in table.column_names:
        failure = first_failure(table)
        is_cut = pc.equal(table["end_reason"], "max_tokens")
        longest = pc.max(pc.list_value_length(table["completion_ids"].filter(is_cut))).as_py()
        reasons = pc.coalesce(table["end_reason"], reasons)
    ends = Counter(reasons.to_pylist()).most_common()
    in_words = ", ".join(f"{number} by {end}" for end, number in ends)
    if failure is not None:
        in_words += f" ({printable(failure)})"
    num_cut = sum(number for end, number in ends if end in ("length", "max_tokens"))
    are_cut = num_cut > len(table) / 2
    return NumericError(
        ", ".join(names),
        f"{int(is_scored.sum())} of {len(is_scored)} rollouts are scored, which is too few for an "
        f"advantage: {need}; the others ended: {in_words or 'none'}",
        next=way_to_end(joined.versions[0].rollouts.manifest, longest)
        if are_cut
        else f"quiver show {names[0]}",
    )


def _parts(config: Config, versions: list[RolloutSet]) -> dict[str, Tensor]:
    """Return `parts` [B, P], NaN for an absent part, and their weights, from the manifest of their
    version or else 1.

    Raises ConfigError if a person has corrected the sums, since the parts are then outdated.
    """
    tables = []
    for version in versions:
        manifest = version.inputs["rewards"].manifest
        if manifest.stage == "override":
            raise ConfigError(
                f"optimize.algorithm {config.algorithm}",
                f"needs the parts of the rewards, and {manifest.ref} corrects only their sums",
                next=f"name {manifest.require_input('rewards').ref}, or take grpo",
            )
        scorers = [
            {"name": "overlong", **manifest.config_section("overlong")},  # unless a scorer is that
            *itertools.chain(*(manifest.config.get(kind, ()) for kind in SCORERS)),
        ]
        weights = {scorer["name"]: scorer.get("weight", 1.0) for scorer in scorers}
        column = version.column("rewards", "parts").combine_chunks()
        tables.append(
            {
                name: (_tensor(pc.struct_field(column, name), np.float64), weights.get(name, 1.0))
                for name in column.type.names
            }
        )
    names = list(dict.fromkeys(itertools.chain(*tables)))
    parts = []
    part_weights = []
    for version, table in zip(versions, tables, strict=True):
        absent = torch.full((len(version.table),), torch.nan, dtype=torch.float64)
        columns = [table.get(name, (absent, 1.0)) for name in names]
        parts.append(torch.stack([values for values, _ in columns], dim=1))
        row = torch.tensor([weight for _, weight in columns], dtype=torch.float64)
        part_weights.append(row.expand_as(parts[-1]))
    return {"parts": torch.cat(parts), "part_weights": torch.cat(part_weights)}


def _drop_reasons(
    config: Config,
    algorithm: Algorithm,
    joined: _Joined,
    shaped_rewards: Tensor,
    advantages: Tensor,
) -> list[str | None]:
    """Return [B] the first reason why each rollout is dropped, or None."""
    everyone = torch.ones(len(advantages), dtype=torch.bool)
    is_equal = zero_variance(shaped_rewards, joined.groups)
    if algorithm.advantage == "part_normalized" or algorithm.advantage_of == "turns":
        is_equal &= advantages == 0  # equal sums can be made of different parts or turns
    holds = {
        "abort": _ended_by(joined.table, "abort"),
        "not_scored": shaped_rewards.isnan(),
        "small_group": advantages.isnan(),
        "zero_variance": is_equal & bool(config.drop_zero_variance),
        "length": _ended_by(joined.table, "length") & (config.on_length == "mask"),
        "empty": _lengths(joined.table) == 0,
        None: everyone,
    }
    reasons = list(holds)
    first = torch.stack(list(holds.values())).int().argmax(0)  # the first of equal values
    return [reasons[index] for index in first.tolist()]


def _make_batch(
    config: Config,
    algorithm: Algorithm,
    joined: _Joined,
    rows: Tensor,
    advantages: Tensor,
    is_masked: Tensor,
) -> Batch:
    """Return the rollouts `rows` [k] as tensors; rollouts in `is_masked` [B] have no loss."""
    table = joined.table
    prompts = Mapped.from_arrow(table["prompt_ids"]).take(rows)
    completions = Mapped.from_arrow(table["completion_ids"]).take(rows)
    temperature = _tensor(table["temperature"], np.float32)[rows]
    groups = joined.groups[rows].tolist()
    turns = joined.turns and joined.turns.take(rows)
    media = joined.media and joined.media.take(rows)

    def take(logprobs: str) -> Tensor | None:
        if logprobs not in table.column_names:
            return None
        return Mapped.from_arrow(table[logprobs]).take(rows).values

    old_logprobs = take("old_logprobs")
    if algorithm.advantage_of != "rollouts":
        advantages = torch.full_like(old_logprobs, torch.nan)
    else:
        advantages = advantages[rows]
    return Batch(
        sequences=Sequences(prompts, completions, temperature, turns, media),
        groups=groups,
        prompt_numbers=prompt_numbers(prompts, groups),
        advantages=advantages,
        old_logprobs=old_logprobs,
        prox_logprobs=take("prox"),
        ref_logprobs=take("ref"),
        masked=is_masked[rows],
        origins=[joined.origins[row] for row in rows.tolist()],
        max_completion_tokens=config.max_completion_tokens
        or max(map(_max_completion_tokens, joined.versions)),
        rewards=joined.rewards[rows],
        turn_rewards=joined.turn_rewards and joined.turn_rewards.take(rows),
        cut=_ended_by(table, "length")[rows],
    )


def _summarize(joined: _Joined, reasons: list[str | None]) -> dict[str, Any]:
    """Return the manifest's summary of the rollouts and, if there are several versions, of each."""
    scored = joined.rewards[~joined.rewards.isnan()].double()
    dropped = Counter(reason for reason in reasons if reason)
    summary = {
        "reward_mean": float(scored.mean()),
        "reward_std": float(scored.std()) if len(scored) > 1 else 0.0,
        "rollouts": len(reasons),
        "kept": reasons.count(None),
        "dropped": dict(sorted(dropped.items())),
    }
    if len(joined.versions) > 1:
        summary["versions"] = {}
        start = 0
        for version in joined.versions:
            end = start + len(version.table)
            summary["versions"][str(version.rollouts.ref)] = {
                "stale": version.stale,
                "rollouts": len(version.table),
                "kept": reasons[start:end].count(None),
                "reward_mean": float(joined.rewards[start:end].nanmean(dtype=torch.float64)),
            }
            start = end
    return summary


def _max_completion_tokens(version: RolloutSet) -> int:
    """Return the token limit of this version's generation, over all turns; else its longest
    completion."""
    section = "turns" if "turns" in version.table.column_names else "sampling"
    allowed = version.rollouts.manifest.config_section(section).get("max_tokens")
    if isinstance(allowed, int) and allowed > 0:
        return allowed
    return pc.max(pc.list_value_length(version.table["completion_ids"])).as_py() or 1


def _lengths(table: pa.Table) -> Tensor:
    """Return the number of sampled ids of each rollout, [B] int64."""
    return _tensor(pc.list_value_length(table["completion_ids"]), np.int64)


def _ended_by(table: pa.Table, reason: str) -> Tensor:
    """Return [B] bool: the rollout's finish_reason is `reason`."""
    return _tensor(pc.equal(table["finish_reason"], reason), bool)


def _tensor(column: pa.ChunkedArray | pa.Array, dtype: type) -> Tensor:
    """Return `column` as a tensor [B] of `dtype`; null becomes NaN."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return torch.from_numpy(np.array(column, dtype=dtype))
