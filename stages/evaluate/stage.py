"""evaluate: scored held-out rollouts become evaluations/1, with score, standard error and pass@k in
the manifest.

Null scores are left out of every estimate and counted; where all are null there is nothing to say,
and the stage fails. With a `baseline`, an evaluation on the same prompts, the difference to it is
estimated prompt by prompt.

    ref = run(Config(k=(1, 4)), store, rollouts="held/rollouts@1", rewards="held/rewards@1")
    store.open(ref).manifest.metrics    # {"score": 0.31, "stderr": 0.04, "n": 64, "pass@k": {"1": {…}, "4": {…}}, …}
    run(config, store, rollouts=…, rewards=…, baseline=ref)             # "difference": {"score": {"score": 0.05, "stderr": …}, …}
"""

from __future__ import annotations

import difflib
import logging
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import field_validator

from quiver.schemas import evaluations
from quiver.schemas.errors import ConfigError, LineageError, NumericError, printable
from quiver.schemas.refs import Ref
from quiver.stages.common.config import Config as Base
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import ROWS_PER_SHARD, begin, is_made_alike

from . import estimators

STAGE_VERSION = 1
log = logging.getLogger(__name__)


class Config(Base):
    """What an evaluation measures."""

    score: str = "reward"
    """`reward`, or the name of one reward function: its part alone, before its weight."""
    k: tuple[int, ...] = (1,)
    """For each k: the unbiased estimate that one of k samples is correct. A prompt with fewer
    samples is left out of it."""
    threshold: float = 1.0
    """A sample is correct where its score is at least this."""

    @field_validator("k")
    @classmethod
    def _positive(cls, k: tuple[int, ...]) -> tuple[int, ...]:
        if any(each < 1 for each in k) or len(set(k)) != len(k):
            raise ValueError("each k is at least 1 and stands once")
        return k


def run(
    config: Config,
    store: Store,
    *,
    rollouts: str | Ref,
    rewards: str | Ref,
    baseline: str | Ref | None = None,
    into: str | None = None,
    force: bool = False,
) -> Ref:
    """Evaluate scored `rollouts`. LineageError: the rewards are of other rollouts, or `baseline`,
    the evaluation to compare with, is on other prompts or was scored otherwise. NumericError:
    nothing was scored."""
    sampled, scored = store.open(rollouts), store.open(rewards)
    _require_lineage(sampled, scored)
    compared = None if baseline is None else store.open(baseline)
    if compared:
        _require_same(config, store, sampled, scored, compared)
    with begin(
        store,
        into or sampled.ref.run,
        "evaluations",
        stage="evaluate",
        stage_version=STAGE_VERSION,
        config=config,
        inputs={
            "rollouts": sampled,
            "rewards": scored,
            **({"baseline": compared} if compared else {}),
        },
        models=sampled.manifest.models,
        force=force,
    ) as work:
        if work.done:
            return work.done.ref
        table = _join(sampled, scored, config.score)
        metrics = measure(config, table)
        if compared:
            metrics |= compare(config, table, compared)
        for index, start in enumerate(range(0, table.num_rows, ROWS_PER_SHARD)):
            if not work.has(index):
                work.write(index, table.slice(start, ROWS_PER_SHARD))
        null = table.column("score").null_count
        log.info("score %.4f over %d groups", metrics["score"], metrics["n"])
        return work.commit(
            metrics=metrics, status={"scored": table.num_rows - null, "not_scored": null}
        ).ref


def measure(config: Config, table: pa.Table) -> dict[str, Any]:
    """The manifest's metrics of an evaluations/1 table. NumericError where nothing was scored."""
    groups = _groups(table)
    if not groups:
        raise NumericError(
            "evaluation",
            f"none of {len(table)} rollouts has a score",
            next="look at the column errors of the rewards",
        )
    passes = {}
    for k in config.k:
        if k > max(map(len, groups.values())):
            raise ConfigError(
                f"evaluate.k {k}",
                f"no prompt has {k} scored samples, the most is {max(map(len, groups.values()))}",
                next="raise samples_per_prompt of the evaluation, or lower k",
            )
        passes[str(k)] = estimators.mean_pass_at_k(groups, k, _threshold(config))._asdict()
    return {
        **estimators.clustered_mean(groups)._asdict(),
        "pass@k": passes,
        "num_groups": pc.count_distinct(table.column("group_id")).as_py(),
        "null": table.column("score").null_count,
    }


def compare(config: Config, table: pa.Table, baseline: Version) -> dict[str, Any]:
    """What the manifest says of an evaluations/1 table beside that of `baseline`, prompt by prompt.

    `difference`: table − baseline, of the score and of pass@k; `baseline`: its score; `unpaired`:
    prompts that only one of them has a score for. NumericError where no prompt has both.
    """
    ours, theirs = _groups(table), _groups(baseline.table())
    both = ours.keys() & theirs.keys()
    if not both:
        raise NumericError(
            "evaluation",
            f"no prompt has a score here and in {baseline.ref}",
            next=f"quiver show {baseline.ref}",
        )
    threshold = _threshold(config)
    passes = {
        k: [estimators.group_passes(groups, k, threshold) for groups in (ours, theirs)]
        for k in config.k
    }
    return {
        "difference": {
            "score": estimators.paired_difference(
                *map(estimators.group_means, (ours, theirs))
            )._asdict(),
            "pass@k": {
                str(k): estimators.paired_difference(*pair)._asdict()
                for k, pair in passes.items()
                if pair[0].keys() & pair[1].keys()
            },
        },
        "baseline": {name: baseline.manifest.metrics[name] for name in ("score", "stderr", "n")},
        "unpaired": len(ours.keys() | theirs.keys()) - len(both),
    }


def _groups(table: pa.Table) -> dict[str, list[float]]:
    """The scores of each group that has one."""
    groups: dict[str, list[float]] = {}
    for group, score in zip(
        table.column("group_id").to_pylist(), table.column("score").to_pylist(), strict=True
    ):
        if score is not None:
            groups.setdefault(group, []).append(score)
    return groups


def _threshold(config: Config) -> float:
    return pa.scalar(
        config.threshold, pa.float32()
    ).as_py()  # rounded as the scores are, so that 0.7 is at least 0.7


def _require_same(
    config: Config, store: Store, rollouts: Version, rewards: Version, baseline: Version
) -> None:
    """LineageError unless `baseline` measured the same, on the same prompts, scored in the same
    way."""
    sampled, scored = (baseline.manifest.input(role) for role in ("rollouts", "rewards"))
    prompts = [
        version.manifest.input("prompts")
        for version in (rollouts, *([store.open(sampled.ref)] if sampled else []))
    ]
    hashes = {entry.content_hash if entry else None for entry in prompts}
    if len(prompts) < 2 or len(hashes) > 1 or None in hashes:
        named = [entry.ref if entry else "none" for entry in prompts]
        what = f"its prompts are {named[1] if len(named) > 1 else 'unknown'}, expected {named[0]}"
    elif baseline.manifest.config != config.model_dump(mode="json"):
        what = (
            f"it measured {printable(baseline.manifest.config)}, expected "
            f"{printable(config.model_dump(mode='json'))}"
        )
    elif scored is None or not is_made_alike(store.open(scored.ref).manifest, rewards.manifest):
        what = (
            f"it was scored otherwise, by {scored.ref if scored else 'nothing'}; these are "
            f"{rewards.ref}"
        )
    else:
        return
    raise LineageError(
        str(baseline.ref),
        f"is no baseline: {what}",
        next="evaluate both on the same [data.held_out], with the same [evaluate]",
    )


def _require_lineage(rollouts: Version, rewards: Version) -> None:
    entry = rewards.manifest.input("rollouts")
    if entry is None or entry.content_hash != rollouts.manifest.content_hash:
        raise LineageError(
            str(rewards.ref),
            f"was made of {entry.ref if entry else 'no rollouts'}, not of {rollouts.ref}",
            next=f"quiver reward RECIPE --rollouts {rollouts.ref}",
        )


def _join(rollouts: Version, rewards: Version, score: str) -> pa.Table:
    """evaluations/1 in the rollouts' order, joined by rollout_id. LineageError for a rollout
    without a row of rewards."""
    sampled, scored = rollouts.table(), rewards.table()
    values = _score_column(scored, score)
    order = pc.index_in(
        sampled.column("rollout_id").combine_chunks(),
        value_set=scored.column("rollout_id").combine_chunks(),
    )
    if order.null_count or scored.num_rows != sampled.num_rows:
        raise LineageError(
            str(rewards.ref),
            f"has {scored.num_rows} rows for {sampled.num_rows} rollouts; {order.null_count} "
            "rollouts are missing",
            next=f"quiver reward RECIPE --rollouts {rollouts.ref} --force",
        )
    columns = {name: sampled.column(name) for name in ("group_id", "sample_index", "rollout_id")}
    lengths = pc.list_value_length(sampled.column("completion_ids"))
    made = [values.take(order), lengths, sampled.column("finish_reason")]
    return pa.table([*columns.values(), *made], schema=evaluations.SCHEMA)


def _score_column(rewards: pa.Table, score: str) -> pa.ChunkedArray:
    if score == "reward":
        return rewards.column("reward")
    parts = rewards.column("parts")
    names = [field.name for field in parts.type]
    if score not in names:
        near = difflib.get_close_matches(score, names, 1, 0.5)
        raise ConfigError(
            f"evaluate.score {printable(score)}",
            f"the rewards have no such part; there are reward, {', '.join(names)}"
            + (f"; did you mean {near[0]}?" if near else ""),
            next="set evaluate.score to one of them",
        )
    return pc.struct_field(parts, [names.index(score)])
