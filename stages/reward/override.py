"""override: replace single rewards of a saved version by a person's values, with author and reason,
as a new rewards version.

Only the reward of the named rows changes (and their last turn reward, so that turn rewards still
add up). Parts, errors and extra keep the scorers' output. Refused: ids that are no rollouts of
these rewards, values that are not finite, a missing author or reason.

    overrides = {"4be1c0de-sum-0017-2": 1.0}
    config = Config(author="ada", reason="right, in another unit", overrides=overrides)
    ref = run_stage("override", config, store, rewards="arith/rewards@3")

From the shell the same fields stand in a JSON file: `quiver reward RECIPE --override FILE.json`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from quiver.schemas.errors import ConfigError, LineageError, printable, reason
from quiver.schemas.outside import Number
from quiver.schemas.plain import read_json
from quiver.stages.core import config as common
from quiver.stages.core.files import read_file
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import Writer

from .measures import summary
from .turns import with_rest

STAGE_VERSION = 1
Text = Annotated[str, Field(pattern=r"\S", max_length=2000)]
log = logging.getLogger(__name__)


class Config(common.Config):
    """Corrections of single rollouts by a person."""

    author: Text
    """Person who makes the corrections."""
    reason: Text
    """Reason for the corrections."""
    overrides: dict[str, Number] = Field(min_length=1)
    """The new reward by rollout_id."""


def load(path: str | Path) -> Config:
    """Read the config from a JSON file: {"author": …, "reason": …, "overrides": {rollout_id:
    reward}}. Raises ConfigError."""
    name = f"--override {printable(path)}"
    try:
        fields = read_json(read_file(Path(path)))
    except OSError as error:
        raise ConfigError(name, reason(error), next="name a JSON file") from None
    except ValueError as error:
        problem = f"is not JSON: {printable(error)}"
        raise ConfigError(name, problem, next="correct the file") from None
    return common.parse(Config, fields, name)


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the new version. `refs["rewards"]` names the rewards to correct. Raises LineageError."""
    rewards = store.open(refs["rewards"])
    sampled = rewards.manifest.input("rollouts")
    if sampled is None:
        raise LineageError(str(rewards.ref), "was not made of saved rollouts", next="quiver ls")
    return Plan(
        store=store,
        stage="override",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or rewards.ref.run,
        kinds=("rewards",),
        inputs={"rollouts": store.open(sampled.ref), "rewards": rewards},
        models=rewards.manifest.models,
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Write the rewards with the overrides in place. Raises ConfigError for an unknown id."""
    config = plan.config
    writer = writers["rewards"]
    rewards = plan.inputs["rewards"]
    table = rewards.table()
    rows = table.select(["rollout_id", "reward"]).to_pylist()
    unknown = sorted(config.overrides.keys() - {row["rollout_id"] for row in rows})
    if unknown:
        raise ConfigError(
            f"override {printable(unknown[0])}",
            f"{rewards.ref} has no such rollout; {len(unknown)} of the named rollouts are missing",
            next=f"quiver show {rewards.ref}",
        )
    values = [config.overrides.get(row["rollout_id"], row["reward"]) for row in rows]
    columns = {"reward": values}
    if "turn_rewards" in table.column_names:
        rollouts = plan.inputs["rollouts"].table(["rollout_id", "turns"])
        lengths = pc.list_value_length(rollouts["turns"]).to_pylist()
        num_turns = dict(zip(rollouts["rollout_id"].to_pylist(), lengths, strict=True))
        earned = table["turn_rewards"].to_pylist()
        for place, row in enumerate(rows):
            name = row["rollout_id"]
            if name in config.overrides:
                of_turns = earned[place] or [None] * num_turns[name]
                earned[place] = with_rest(of_turns, config.overrides[name])
        columns["turn_rewards"] = earned
    for name, cells in columns.items():
        place = table.schema.get_field_index(name)
        field = table.schema.field(name)
        table = table.set_column(place, field, pa.array(cells, field.type))
    writer.write_table(table)
    metrics, status = summary(table, {})
    log.info("%d rewards replaced, by %s", len(config.overrides), printable(config.author))
    writer.finish(metrics=metrics | {"overridden": len(config.overrides)}, status=status)
