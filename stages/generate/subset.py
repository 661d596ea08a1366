"""subset: some prompts of saved rollouts with all their answers, as a rollouts version of its own.

The prompts are drawn once, by a seed, so that a costly reward scores a part of the rollouts. Rows
keep their ids: the rewards of the part and of the whole join. The version names no policy, so
training on it is refused; only rewards are made from it.

    ref = run_stage("subset", Config(prompts=64), store, rollouts="arith/rollouts@3")
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from quiver.stages.core import config as common
from quiver.stages.core.lineage import open_input
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import Writer

STAGE_VERSION = 1


class Config(common.Config):
    """How many prompts are drawn."""

    prompts: int = Field(default=64, ge=1)
    """Number of prompts; all of them if there are fewer."""
    seed: int = Field(default=0, ge=0)
    """Seed of the draw."""


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the part of `refs["rollouts"]`. Raises LineageError if it has no prompts."""
    rollouts = store.open(refs["rollouts"])
    return Plan(
        store=store,
        stage="subset",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or rollouts.ref.run,
        kinds=("rollouts",),
        inputs={"prompts": open_input(store, rollouts, "prompts"), "rollouts": rollouts},
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Write the rows of the drawn prompts, in the order of the rollouts."""
    table = plan.inputs["rollouts"].table()
    groups = pc.unique(table["group_id"])
    order = np.random.default_rng(plan.config.seed).permutation(len(groups))
    drawn = groups.take(pa.array(order[: plan.config.prompts]))
    writers["rollouts"].write_table(table.filter(pc.is_in(table["group_id"], value_set=drawn)))
    writers["rollouts"].finish()
