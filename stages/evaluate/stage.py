"""evaluate: turn scored held-out rollouts into evaluations/1, with score, standard error and pass@k
in the manifest.

An answer that was cut by a limit and has no score, although no scorer failed, counts by the rule
`unscored`, by default as 0. All other null scores are left out of every estimate and counted; if
all are null, the stage fails. With a `baseline`, an evaluation on the same prompts, the difference
to it is estimated prompt by prompt.

The word `baseline` has three uses:

    role        the evaluation to compare with; nights name one, `quiver run` does not
    metric      in this manifest, the score of that evaluation
    printed     by `quiver run`, the evaluation of the base policy

`quiver compare` pairs prompts in the same way. The formulas are in `estimators.py`: prompts are the
independent units, and an error is the spread of their means.

    refs = {"rollouts": "held/rollouts@1", "rewards": "held/rewards@1"}
    ref = run_stage("evaluate", Config(k=(1, 4)), store, **refs)
    store.open(ref).manifest.metrics
    # {"score": 0.31, "stderr": 0.04, "n": 64, "pass@k": {"1": {…}, "4": {…}}, …}
    run_stage("evaluate", config, store, rollouts=…, rewards=…, baseline=ref)
    # "difference": {"score": {"score": 0.05, "stderr": …}, …}
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import evaluations
from quiver.schemas.errors import ConfigError, LineageError, NumericError, did_you_mean, printable
from quiver.schemas.metrics import score_numbers
from quiver.stages.core.run.stage import Plan, Refs, is_made_alike
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Writer

from . import estimators
from .answers import fill_cut_scores, turns_to_success
from .config import IS_THE_SUM, Config

STAGE_VERSION = 1
log = logging.getLogger(__name__)


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the evaluation of `rollouts` by their `rewards`, compared with `baseline` if it is
    given.

    Raises LineageError if the rewards are of other rollouts, or if the baseline has other prompts
    or was scored differently.
    """
    rollouts = store.open(refs["rollouts"])
    rewards = store.open(refs["rewards"])
    rewarded = rewards.manifest.input("rollouts")
    if rewarded is None or rewarded.content_hash != rollouts.manifest.content_hash:
        raise LineageError(
            str(rewards.ref),
            f"was made of {rewarded.ref if rewarded else 'no rollouts'}, not of {rollouts.ref}",
            next=f"quiver reward RECIPE --rollouts {rollouts.ref}",
        )
    inputs = {"rollouts": rollouts, "rewards": rewards}
    if "baseline" in refs:
        baseline = store.open(refs["baseline"])
        difference = _difference_to(baseline, config, store, rollouts, rewards)
        if difference:
            raise LineageError(
                str(baseline.ref),
                f"cannot be the baseline: {difference}",
                next="evaluate both on the same [data.held_out], with the same [evaluate]",
            )
        inputs["baseline"] = baseline
    return Plan(
        store,
        stage="evaluate",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or rollouts.ref.run,
        kinds=("evaluations",),
        inputs=inputs,
        models=rollouts.manifest.models,
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Join rollouts and rewards, and estimate. Raises NumericError if nothing was scored."""
    config = plan.config
    writer = writers["evaluations"]
    inputs = plan.inputs
    table = _join(inputs["rollouts"], inputs["rewards"], config.score)
    not_scored = table["score"].null_count
    table, metrics = fill_cut_scores(config, table, inputs)
    metrics |= measure(config, table)
    metrics |= turns_to_success(inputs["rollouts"], table["score"], threshold_of(config))
    if "baseline" in inputs:
        metrics |= compare(config, table, inputs["baseline"])
    writer.write_table(table)
    log.info("score %(score).4f, prompts: %(n)d, answers left out: %(null)d", metrics)
    num_scored = len(table) - not_scored
    writer.finish(metrics=metrics, status={"scored": num_scored, "not_scored": not_scored})


def measure(config: Config, table: pa.Table) -> dict[str, Any]:
    """Return the manifest's metrics of an evaluations/1 table. Raises NumericError if nothing was
    scored, ConfigError if no prompt has k samples."""
    scores = scores_by_group(table)
    if not scores:
        raise NumericError(
            "evaluation",
            f"none of {len(table)} rollouts has a score",
            next="look at the column errors of the rewards",
        )
    most_samples = max(map(len, scores.values()))
    passes = {}
    for k in config.k:
        if k > most_samples:
            raise ConfigError(
                f"evaluate.k {k}",
                f"no prompt has {k} scored samples, the most is {most_samples}",
                next="raise samples_per_prompt of the evaluation, or lower k",
            )
        by_group = estimators.group_passes(scores, k, threshold_of(config))
        passes[str(k)] = estimators.with_interval({name: [p] for name, p in by_group.items()})
    return {
        **estimators.with_interval(scores),
        "pass@k": passes,
        "num_groups": pc.count_distinct(table["group_id"]).as_py(),
    }


def compare(config: Config, table: pa.Table, baseline: Version) -> dict[str, Any]:
    """Compare an evaluations/1 table with the table of `baseline`, prompt by prompt, for the
    manifest.

    Returns `difference`: table − baseline, of the score and of pass@k; `baseline`: its score;
    `unpaired`: number of prompts that only one of them has a score for. Raises NumericError if no
    prompt has both.
    """
    ours = scores_by_group(table)
    theirs = scores_by_group(baseline.table())
    num_paired = len(ours.keys() & theirs.keys())
    if not num_paired:
        raise NumericError(
            "evaluation",
            f"no prompt has a score here and in {baseline.ref}",
            next=f"quiver show {baseline.ref}",
        )
    threshold = threshold_of(config)  # the baseline's too: `plan` refuses another config
    return {
        "difference": estimators.differences(ours, theirs, config.k, (threshold, threshold)),
        "baseline": score_numbers(baseline.manifest.metrics),
        "unpaired": len(ours.keys() | theirs.keys()) - num_paired,
    }


def scores_by_group(table: pa.Table) -> dict[str, list[float]]:
    """Return the scores of each group that has one."""
    groups: dict[str, list[float]] = {}
    for row in table.select(["group_id", "score"]).to_pylist():
        if row["score"] is not None:
            groups.setdefault(row["group_id"], []).append(row["score"])
    return groups


def threshold_of(config: Config) -> float:
    """Return the threshold in float32, as scores are stored, so that 0.7 is at least 0.7."""
    return pa.scalar(config.threshold, pa.float32()).as_py()


def _difference_to(
    baseline: Version, config: Config, store: Store, rollouts: Version, rewards: Version
) -> str:
    """Describe how `baseline` differs from this evaluation; empty if it is comparable."""
    their_rollouts = baseline.manifest.input("rollouts")
    prompts = rollouts.manifest.input("prompts")
    their_prompts = their_rollouts and store.open(their_rollouts.ref).manifest.input("prompts")
    if not prompts or not their_prompts or prompts.content_hash != their_prompts.content_hash:
        theirs, ours = (entry.ref if entry else "unknown" for entry in (their_prompts, prompts))
        return f"its prompts are {theirs}, expected {ours}"
    measured = config.model_dump(mode="json")
    theirs = measured | baseline.manifest.config
    if theirs != measured:
        return f"it measured {printable(theirs)}, expected {printable(measured)}"
    their_rewards = store.open(baseline.manifest.require_input("rewards").ref)
    if not is_made_alike(their_rewards.manifest, rewards.manifest):
        return f"it was scored differently, by {their_rewards.ref}; these are {rewards.ref}"
    return ""


def _join(rollouts: Version, rewards: Version, score: str) -> pa.Table:
    """Return evaluations/1 in the rollouts' order, joined by rollout_id. `score`: `reward`, or one
    of its parts. Raises ConfigError; LineageError for a rollout without a row of rewards."""
    sampled = rollouts.table()
    scored = rewards.table()
    parts = scored["parts"]
    part_names = [field.name for field in parts.type]
    if score == "reward":
        scores = scored["reward"]
        if score in part_names:
            part = pc.struct_field(parts, [part_names.index(score)])
            if not pc.all(pc.equal(part, scores)).as_py():
                log.warning(IS_THE_SUM)
    elif score in part_names:
        scores = pc.struct_field(parts, [part_names.index(score)])
    else:
        raise ConfigError(
            f"evaluate.score {printable(score)}",
            f"the rewards have no such part; there are reward, {', '.join(part_names)}"
            + did_you_mean(score, part_names),
            next="set evaluate.score to one of them",
        )
    order = pc.index_in(
        sampled["rollout_id"].combine_chunks(),
        value_set=scored["rollout_id"].combine_chunks(),
    )
    if order.null_count or scored.num_rows != sampled.num_rows:
        raise LineageError(
            str(rewards.ref),
            f"has {scored.num_rows} rows for {sampled.num_rows} rollouts; {order.null_count} "
            "rollouts are missing",
            next=f"quiver reward RECIPE --rollouts {rollouts.ref} --force",
        )
    names = ("group_id", "sample_index", "rollout_id", "finish_reason")
    columns = {name: sampled.column(name) for name in names}
    columns["score"] = scores.take(order)
    columns["completion_tokens"] = pc.list_value_length(sampled["completion_ids"])
    return pa.table(columns, schema=evaluations.SCHEMA)
