"""Saved rollouts, rewards and logprobs joined into one batch; each rollout that is left out has its
reason.

Joins go by `rollout_id`; what has no partner, or belongs to other rollouts, is an error. Of several
versions of rollouts each is checked and joined by itself, each row keeps its own old logprobs and
temperature, and groups never mix: the same prompt in two versions is two groups, because other
policies answered it. The reasons, in this order: `abort` (the engine gave up), `not_scored` (null
reward), `small_group` (fewer than two scored), `zero_variance`, `length` (masked), `empty` (no
token).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from quiver.schemas.errors import ConfigError, LineageError, NumericError, SchemaError
from quiver.stages.common.forward.layout import Sequences, prompt_numbers
from quiver.stages.common.models.loading import check_rows
from quiver.stages.common.ragged import Mapped, Ragged
from quiver.stages.common.store import Store, Version

from . import advantages
from .algorithms import Algorithm, part
from .checks import Sampled, check_lineage, require_own_ids
from .inputs import sets
from .losses import log_ratio
from .objective import Batch

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
    """rollout_id of all rollouts, version after version"""
    kept: torch.Tensor
    """[k] int64: which of them are the batch's rows"""
    reasons: list[str | None]
    """for all: why it was dropped, None where it was kept"""
    advantages: torch.Tensor
    """for all: NaN where it was dropped; with a critic, which judges later, the reward"""
    summary: dict[str, Any]
    """for the manifest: counts and means"""


def load(config: Config, algorithm: Algorithm, store: Store, inputs: dict[str, Version]) -> Loaded:
    """Check, join, weigh and filter. LineageError, ConfigError, SchemaError; NumericError when no
    rollout can have an advantage."""
    versions = [Sampled(own) for own in sets(inputs)]
    biased = list(
        dict.fromkeys(bias for own in versions for bias in check_lineage(config, store, own))
    )
    scores = torch.cat([_reward_tensor(own.column("rewards", "reward")) for own in versions])
    require_own_ids(versions)
    if not len(scores):
        raise _nothing(versions, 0, 0)
    for own in versions:
        check_rows(
            own.table,
            str(own.rollouts.ref),
            own.inputs["policy"],
            with_next_state=config.bootstrap_length,
        )
    table = pa.concat_tables([own.table for own in versions])
    scores = torch.where(_mask(pc.equal(table["finish_reason"], "abort")), torch.nan, scores)
    groups = _groups(versions)
    extra = {role: _logprobs(versions, role) for role in ("ref", "prox")}
    shaped = scores
    if config.kl_in_reward and not algorithm.critic:
        shaped = scores - config.kl_coef * _divergence(table, extra["ref"])
    weights = (
        scores if algorithm.critic else part("advantages", algorithm.advantage)(shaped, groups)
    )
    if bool(weights.isnan().all()):
        _require_groups(config.algorithm, groups, int((~scores.isnan()).sum()))
        raise _nothing(versions, len(scores), int((~scores.isnan()).sum()))
    reasons = _reasons(config, table, shaped, groups, weights)
    kept = torch.tensor(
        [i for i, reason in enumerate(reasons) if reason is None], dtype=torch.int64
    )
    scored = scores[~scores.isnan()].double()
    summary = {
        "reward_mean": float(scored.mean()),
        "reward_std": float(scored.std()) if len(scored) > 1 else 0.0,
        "rollouts": len(scores),
        "kept": len(kept),
        "dropped": dict(sorted(Counter(reason for reason in reasons if reason).items())),
        "zero_advantage": 0 if algorithm.critic else int((weights[kept] == 0).sum()),
        "all_advantages_zero": not (
            bool((weights[kept] != 0).any()) or (algorithm.critic and len(kept))
        ),
        "biased_sampling": biased,
    }
    if len(versions) > 1:
        summary["versions"] = _by_version(versions, scores, reasons)
    if not len(kept):
        log.warning(
            "no rollout is left to learn from (%s): there is nothing to learn, the weights stay",
            _counted(summary),
        )
    elif summary["all_advantages_zero"]:
        log.warning(
            "every advantage is 0 (each group's rewards are equal): there is nothing to learn "
            "from these rollouts"
        )
    filled = config.model_copy(
        update={
            "max_completion_tokens": config.max_completion_tokens or max(map(_longest, versions))
        }
    )
    stale = torch.cat([torch.full((len(own.table),), own.stale) for own in versions])
    batch = _batch(table, kept, groups, weights, extra, stale)
    if algorithm.critic:
        cut = _mask(pc.equal(table["finish_reason"], "length"))[kept]
        batch = dataclasses.replace(
            batch, advantages=torch.full_like(batch.old, torch.nan), rewards=scores[kept], cut=cut
        )
    return Loaded(filled, batch, table["rollout_id"], kept, reasons, weights, summary)


def _groups(versions: Sequence[Sampled]) -> torch.Tensor:
    """[B] int64: numbers of the groups, those of each version its own."""
    numbers, count = [], 0
    for own in versions:
        numbers.append(group_numbers(own.table["group_id"]) + count)
        count += int(numbers[-1].max()) + 1 if len(own.table) else 0
    return torch.cat(numbers)


def group_numbers(column: pa.ChunkedArray) -> torch.Tensor:
    """[B] int64: each group id's number, in order of first appearance."""
    encoded = pc.dictionary_encode(column.combine_chunks())
    return torch.from_numpy(np.array(encoded.indices, dtype=np.int64))


def _reward_tensor(column: pa.ChunkedArray) -> torch.Tensor:
    return torch.from_numpy(
        np.array(column.combine_chunks().fill_null(float("nan")), dtype=np.float32)
    )


def _mask(column: pa.ChunkedArray) -> torch.Tensor:
    return torch.from_numpy(np.array(column.combine_chunks(), dtype=bool))


def _reasons(config, table, scores, groups, weights) -> list[str | None]:
    equal = advantages.zero_variance(scores, groups) & bool(config.drop_zero_variance)
    tests = (
        ("abort", _mask(pc.equal(table["finish_reason"], "abort"))),
        ("not_scored", scores.isnan()),
        ("small_group", weights.isnan()),
        ("zero_variance", equal),
        (
            "length",
            _mask(pc.equal(table["finish_reason"], "length")) & (config.on_length == "mask"),
        ),
        ("empty", _mask(pc.equal(pc.list_value_length(table["completion_ids"]), 0))),
    )
    codes = torch.full((len(scores),), len(tests))
    for code in reversed(range(len(tests))):
        codes[tests[code][1]] = code
    names = [*[name for name, _ in tests], None]
    return [names[code] for code in codes.tolist()]


def _counted(summary: dict[str, Any]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in summary["dropped"].items())


def _require_groups(algorithm: str, groups: torch.Tensor, scored: int) -> None:
    """ConfigError where rollouts are scored, but every prompt has one only."""
    if scored >= 2 and int(groups.bincount().max()) < 2:
        raise ConfigError(
            f"optimize.algorithm {algorithm}",
            f"needs two rollouts of a prompt at least, found one of each of {len(groups)} prompts",
            next="set generate.samples_per_prompt >= 2, or use reinforce_pp or ppo, which need no "
            "group",
        )


def _nothing(versions: Sequence[Sampled], count: int, scored: int) -> NumericError:
    rewards = [str(own.inputs["rewards"].ref) for own in versions]
    return NumericError(
        ", ".join(rewards),
        f"{scored} of {count} rollouts are scored, no advantage can be computed of them; a group "
        "algorithm needs two of a prompt",
        next=f"quiver show {rewards[0]}",
    )


def _by_version(
    versions: Sequence[Sampled], scores: torch.Tensor, reasons: list[str | None]
) -> dict[str, dict[str, Any]]:
    """For the manifest: what each version of rollouts gave."""
    found, start = {}, 0
    for own in versions:
        rows = slice(start, start := start + len(own.table))
        found[str(own.rollouts.ref)] = {
            "stale": own.stale,
            "rollouts": len(own.table),
            "kept": reasons[rows].count(None),
            "reward_mean": float(scores[rows].nanmean(dtype=torch.float64)),
        }
    return found


def _divergence(table: pa.Table, ref: Ragged) -> torch.Tensor:
    """[B] k1 estimate of the KL to the reference, summed over each rollout: Σ old − ref."""
    old = Ragged.from_arrow(table["old_logprobs"])
    return old.with_values(log_ratio(old.values, ref.values)).segment_sum()


def _longest(own: Sampled) -> int:
    """What generation allowed of this version, or its longest completion."""
    told = own.rollouts.manifest.config
    allowed = told.get("max_tokens") or (told.get("sampling") or {}).get("max_tokens")
    return allowed or pc.max(pc.list_value_length(own.table["completion_ids"])).as_py() or 1


def _batch(
    table: pa.Table,
    kept: torch.Tensor,
    groups: torch.Tensor,
    weights: torch.Tensor,
    extra: dict[str, Ragged | None],
    stale: torch.Tensor,
) -> Batch:
    prompts, completions = (
        Mapped.from_arrow(table[name]).take(kept) for name in ("prompt_ids", "completion_ids")
    )
    temperature = torch.from_numpy(
        np.array(table["temperature"].combine_chunks(), dtype=np.float32)
    )[kept]
    chosen = groups[kept].tolist()
    return Batch(
        data=Sequences(prompts, completions, temperature),
        groups=chosen,
        prompts=prompt_numbers(prompts, chosen),
        advantages=weights[kept],
        old=Ragged.from_arrow(table["old_logprobs"]).take(kept).values,
        **{
            role: None if found is None else found.take(kept).values
            for role, found in extra.items()
        },
        stale=stale[kept],
    )


def _logprobs(versions: Sequence[Sampled], role: str) -> Ragged | None:
    """Logprobs `role` of all rollouts; None where none are given."""
    if role not in versions[0].inputs:
        return None
    found = []
    for own in versions:
        other = own.inputs[role]
        told = other.manifest.config.get("role")
        if told is not None and told != role:
            raise LineageError(
                str(other.ref),
                f"holds {told} logprobs, expected {role}",
                next=f"name {role} logprobs",
            )
        found.append(Ragged.from_arrow(own.column(role, "logprobs")))
        if not torch.equal(
            found[-1].lengths, Ragged.from_arrow(own.table["completion_ids"]).lengths
        ):
            raise SchemaError(
                str(other.ref),
                "logprobs and completion_ids differ in length",
                next=f"score {own.rollouts.ref} again",
            )
    return Ragged.from_lengths(
        torch.cat([each.values for each in found]), torch.cat([each.lengths for each in found])
    )
