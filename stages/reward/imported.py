"""imported_rewards: what lines of another system's trajectories say that they are worth becomes
rewards of the rollouts that the stage `imported` made of these lines.

They are rewards/2 where some turn has a reward of its own, else rewards/1. A line without one is
not scored.

    config = Config(source="trajectories.jsonl")
    ref = run_stage("imported_rewards", config, store, rollouts="arith/rollouts@4")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pydantic import Field

from quiver.schemas.errors import LineageError
from quiver.schemas.rewards import schema_for
from quiver.stages.common import config as common
from quiver.stages.common import trajectories
from quiver.stages.common.runtime.stage import Plan, Refs
from quiver.stages.common.store import Store
from quiver.stages.common.store.writer import Writer

from .measures import summary

STAGE_VERSION = 1
_PART = "imported"
"""The one part of such a reward."""


class Config(common.Config):
    """The file whose rewards are meant."""

    source: str = Field(min_length=1)
    """The very file that the rollouts were made of."""
    source_sha256: str = ""
    """Filled in by the stage: hash of the file."""

    def key(self) -> dict[str, Any]:
        """The bytes decide, wherever they lie."""
        return {**super().key(), "source": common.without_folder(self.source)}


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """The rewards of `refs["rollouts"]`. LineageError."""
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
    """Write the rewards, row by row as the rollouts stand. ConfigError."""
    writer = writers["rewards"]
    lines, _ = trajectories.read(plan.config.source, plan.config.source_sha256)
    rollouts = plan.inputs["rollouts"].table(["rollout_id", "group_id"]).to_pylist()
    given = [turn for line in lines.values() for turn in line.turns or ()]
    of_turns = any(turn.reward is not None for turn in given)
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
