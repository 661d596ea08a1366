"""Held-out prompts, rollouts and rewards for the tests of evaluate, made of scores by group."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from quiver.schemas import fields, prompts, rewards, rollouts
from quiver.stages.core.config import Config
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.evaluate import stage
from tests.writing import begin

Scored = tuple[Version, Version]
"""Rollouts and their rewards."""


def write(store: Store, kind: str, table: pa.Table, run: str = "held", **plan) -> Version:
    """Write a version of `kind`, as a stage `test` would unless `plan` says otherwise."""
    plan = {"stage": "test", "stage_version": 1, "config": Config(), "inputs": {}, **plan}
    with begin(store, run, kind, **plan, force=True) as work:
        for index, start in enumerate(range(0, max(1, len(table)), ROWS_PER_SHARD)):
            work.write(index, table.slice(start, ROWS_PER_SHARD))
        return work.commit()


def ask(store: Store, texts: Mapping[str, str], run: str = "held") -> Version:
    """Write prompts: `texts` by group id."""
    schema = fields.with_struct(prompts.SCHEMA, columns=pa.struct([("name", pa.string())]))
    rows = [
        {"group_id": group, "prompt_text": text, "prompt_ids": [1], "columns": {"name": group}}
        for group, text in texts.items()
    ]
    return write(store, "prompts", pa.Table.from_pylist(rows, schema=schema), run)


def score(
    store: Store,
    groups: Mapping[str, Sequence[float | None]],
    prompts: Version | None = None,
    run: str = "held",
    cut: Collection[str] = (),
    failed: Collection[str] = (),
    models: tuple = (),
) -> Scored:
    """Write rollouts, and in reverse order their rewards, whose part `right` is the score times ten.

    `cut`: rollouts `GROUP-INDEX` that ended at the token limit; `failed`: those whose scorer raised
    an error.
    """
    rows = [
        {
            "rollout_id": f"{run}-{group}-{index}",
            "group_id": group,
            "sample_index": index,
            "prompt_ids": [1],
            "completion_ids": [7] * (index + 1),
            "old_logprobs": [-0.5] * (index + 1),
            "finish_reason": "length" if f"{group}-{index}" in cut else "stop",
            "stop_reason": None,
            "completion_text": "x",
            "temperature": 1.0,
            "seed": 0,
            "reward": number,
            "parts": {"right": None if number is None else number * 10},
            "errors": {"right": "ValueError" if f"{group}-{index}" in failed else None},
        }
        for group, numbers in groups.items()
        for index, number in enumerate(numbers)
    ]
    table = pa.Table.from_pylist(rows, schema=rollouts.SCHEMA)
    inputs = {"prompts": prompts} if prompts else {}
    sampled = write(store, "rollouts", table, run, inputs=inputs, models=models)
    table = pa.Table.from_pylist(rows[::-1], schema=rewards.schema_for(["right"]))
    return sampled, write(store, "rewards", table, run, inputs={"rollouts": sampled})


def evaluate(
    store: Store,
    scored: Scored,
    baseline: Version | None = None,
    into: str = "held",
    force: bool = False,
    note: str = "",
    **config,
) -> Version:
    """Run the stage."""
    refs = {"rollouts": scored[0].ref, "rewards": scored[1].ref}
    if baseline:
        refs["baseline"] = baseline.ref
    options = {"in_process": True, "into": into, "force": force, "note": note}
    return store.open(run_stage("evaluate", stage.Config(**config), store, **refs, **options))
