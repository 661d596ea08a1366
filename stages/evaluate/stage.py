"""evaluate: scored held-out rollouts become evaluations/1, with score, standard error and pass@k in the manifest.

Null scores are left out of every estimate and counted; where all are null there is nothing to say, and the stage fails.

    ref = run(Config(k=(1, 4)), store, rollouts="held/rollouts@1", rewards="held/rewards@1")
    store.open(ref).manifest.metrics    # {"score": 0.31, "stderr": 0.04, "n": 64, "pass@k": {"1": {…}, "4": {…}}, …}
"""

from __future__ import annotations

import difflib
import logging
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import field_validator

from schemas import evaluations
from schemas.errors import ConfigError, LineageError, NumericError, printable
from schemas.refs import Ref
from stages.common.config import Config as Base
from stages.common.store import Store, Version
from stages.common.work import ROWS_PER_SHARD, begin

from . import estimators

STAGE_VERSION = 1
log = logging.getLogger(__name__)


class Config(Base):
    """What an evaluation measures."""

    score: str = "reward"
    """`reward`, or the name of one reward function: its part alone, before its weight."""
    k: tuple[int, ...] = (1,)
    """For each k: the unbiased estimate that one of k samples is correct. A prompt with fewer samples is left out of it."""
    threshold: float = 1.0
    """A sample is correct where its score is at least this."""

    @field_validator("k")
    @classmethod
    def _positive(cls, k: tuple[int, ...]) -> tuple[int, ...]:
        if any(each < 1 for each in k) or len(set(k)) != len(k):
            raise ValueError("each k is at least 1 and stands once")
        return k


def run(
    config: Config, store: Store, *, rollouts: str | Ref, rewards: str | Ref, into: str | None = None, force: bool = False
) -> Ref:
    """Evaluate scored `rollouts`. LineageError: the rewards are of other rollouts. NumericError: nothing was scored."""
    sampled, scored = store.open(rollouts), store.open(rewards)
    _require_lineage(sampled, scored)
    with begin(
        store,
        into or sampled.ref.run,
        "evaluations",
        stage="evaluate",
        stage_version=STAGE_VERSION,
        config=config,
        inputs={"rollouts": sampled, "rewards": scored},
        models=sampled.manifest.models,
        force=force,
    ) as work:
        if work.done:
            return work.done.ref
        table = _join(sampled, scored, config.score)
        metrics = measure(config, table)
        for index, start in enumerate(range(0, table.num_rows, ROWS_PER_SHARD)):
            if not work.has(index):
                work.write(index, table.slice(start, ROWS_PER_SHARD))
        null = table.column("score").null_count
        log.info("score %.4f over %d groups", metrics["score"], metrics["n"])
        return work.commit(metrics=metrics, status={"scored": table.num_rows - null, "not_scored": null}).ref


def measure(config: Config, table: pa.Table) -> dict[str, Any]:
    """The manifest's metrics of an evaluations/1 table. NumericError where nothing was scored."""
    threshold = pa.scalar(config.threshold, pa.float32()).as_py()  # rounded as the scores are, so that 0.7 is at least 0.7
    groups: dict[str, list[float]] = {}
    ids = table.column("group_id").to_pylist()
    for group, score in zip(ids, table.column("score").to_pylist(), strict=True):
        if score is not None:
            groups.setdefault(group, []).append(score)
    if not groups:
        raise NumericError(
            "evaluation", f"none of {len(ids)} rollouts has a score", next="quiver show the rewards: their errors say why"
        )
    passes = {}
    for k in config.k:
        if k > max(map(len, groups.values())):
            raise ConfigError(
                f"evaluate.k {k}",
                f"no prompt has {k} scored samples, the most is {max(map(len, groups.values()))}",
                next="raise samples_per_prompt of the evaluation, or lower k",
            )
        passes[str(k)] = estimators.mean_pass_at_k(groups, k, threshold)._asdict()
    num_groups = len(set(ids))
    return {
        **estimators.clustered_mean(groups)._asdict(),
        "pass@k": passes,
        "num_groups": num_groups,
        "null": table.column("score").null_count,
    }


def _require_lineage(rollouts: Version, rewards: Version) -> None:
    entry = rewards.manifest.input("rollouts")
    if entry is None or entry.content_hash != rollouts.manifest.content_hash:
        raise LineageError(
            str(rewards.ref),
            f"was made of {entry.ref if entry else 'no rollouts'}, not of {rollouts.ref}",
            next=f"quiver reward --rollouts {rollouts.ref}",
        )


def _join(rollouts: Version, rewards: Version, score: str) -> pa.Table:
    """evaluations/1 in the rollouts' order, joined by rollout_id. LineageError for a rollout without a row of rewards."""
    sampled, scored = rollouts.table(), rewards.table()
    values = _score_column(scored, score)
    order = pc.index_in(sampled.column("rollout_id").combine_chunks(), value_set=scored.column("rollout_id").combine_chunks())
    if order.null_count or scored.num_rows != sampled.num_rows:
        raise LineageError(
            str(rewards.ref),
            f"has {scored.num_rows} rows for {sampled.num_rows} rollouts; {order.null_count} rollouts are missing",
            next=f"quiver reward --rollouts {rollouts.ref} --force",
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
