"""imported_rewards: take the rewards in another system's trajectories as the rewards of the
rollouts that the stage `imported` made from the same file.

The result is rewards/2 if some turn has a reward of its own, else rewards/1. A line without a
reward is not scored.

    config = Config(source="trajectories.jsonl")
    ref = run_stage("imported_rewards", config, store, rollouts="arith/rollouts@4")
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from quiver.schemas.errors import LineageError
from quiver.schemas.rewards import schema_for
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import Writer
from quiver.stages.turns import trajectories
from quiver.stages.turns.trajectories import Source as Config

from .measures import summary

STAGE_VERSION = 1
_PART = "imported"
"""Name of the only part of such a reward."""


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the rewards of `refs["rollouts"]`. Raises LineageError unless they were imported."""
    rollouts = store.open(refs["rollouts"])
    manifest = rollouts.manifest
    if manifest.stage != "imported":
        raise LineageError(
            str(rollouts.ref),
            "was not made of a file of trajectories",
            next=f"quiver lineage {rollouts.ref}",
        )
    sha256 = manifest.config["source_sha256"]
    return Plan(
        store=store,
        stage="imported_rewards",
        stage_version=STAGE_VERSION,
        config=config.model_copy(update={"source_sha256": sha256}),
        run=into or rollouts.ref.run,
        kinds=("rewards",),
        inputs={"rollouts": rollouts},
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Write the rewards, in the order of the rollouts. Raises ConfigError."""
    writer = writers["rewards"]
    lines, _ = trajectories.read(plan.config.source, plan.config.source_sha256)
    rollouts = plan.inputs["rollouts"].table(["rollout_id", "group_id"]).to_pylist()
    turns = [turn for line in lines.values() for turn in line.turns or ()]
    of_turns = any(turn.reward is not None for turn in turns)
    rows = []
    for rollout, line in zip(rollouts, lines.values(), strict=True):
        reward = line.total_reward
        row = {**rollout, "reward": reward, "parts": {_PART: reward}, "errors": {_PART: None}}
        if of_turns:
            row["turn_rewards"] = line.turn_rewards
        rows.append(row)
    table = pa.Table.from_pylist(rows, schema_for([_PART], of_turns=of_turns))
    writer.write_table(table)
    metrics, status = summary(table, {})
    writer.finish(metrics=metrics, status=status)
