"""Take over rewards from an earlier version of the same rollouts, and score only the rows without
one.

Rewards, parts, errors and extra are taken over byte for byte. So the recipe must name the same
parts with the same weights. A function's code and arguments may differ, since fixing them is the
purpose of a retry.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rewards
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.config import parse
from quiver.stages.common.store import Version

from .config import SCORERS, Config


def require_same(earlier: Version, rollouts: Version, config: Config) -> None:
    """Check that `earlier` fits.

    Raises:
        LineageError: It was not made from `rollouts`.
        ConfigError: It is an override, or its parts or weights differ from those in `config`.
    """
    entry = earlier.manifest.input("rollouts")
    if entry is None or entry.content_hash != rollouts.manifest.content_hash:
        raise LineageError(
            str(earlier.ref),
            f"was made of {entry.ref if entry else 'no rollouts'}, not of {rollouts.ref}",
            next=f"name rewards of {rollouts.ref}, or leave --retry out",
        )
    if earlier.manifest.stage == "override":
        replaced = earlier.manifest.require_input("rewards").ref
        raise ConfigError(
            f"--retry {earlier.ref}",
            f"a person replaced rewards of {replaced} in it: what is scored again belongs there",
            next=f"--retry {replaced}, then override again",
        )
    saved = parse(Config, earlier.manifest.config, str(earlier.ref))
    before = _arithmetic(saved.model_dump(mode="json"))
    after = _arithmetic(config.model_dump(mode="json"))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"--retry {earlier.ref}",
                f"{name} was {before.get(name)} there and is {after.get(name)} in the recipe: the "
                "rewards of one group would not be comparable",
                next="restore [reward] as it was, or leave --retry out to score all rows",
            )


def _arithmetic(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that turn parts into rewards."""
    scorers = [scorer for kind in SCORERS for scorer in config.get(kind, ())]
    weights = {f"weight of {scorer['name']}": scorer["weight"] for scorer in scorers}
    return {**weights, "reward_clip": config.get("reward_clip"), "overlong": config.get("overlong")}


def aligned(
    earlier: pa.Table, rollouts: pa.Table, names: list[str], extras: list[str], *, of_turns: bool
) -> pa.Table:
    """Return the earlier rewards in the order of `rollouts`, joined by id, with parts in the order
    of `names`. `of_turns`: with turn rewards. Raises LineageError if a rollout has no row."""
    order = pc.index_in(
        rollouts.column("rollout_id").combine_chunks(),
        earlier.column("rollout_id").combine_chunks(),
    )
    if order.null_count:
        raise LineageError(
            "--retry",
            f"{order.null_count} rollouts have no row in these rewards",
            next="leave --retry out",
        )
    schema = rewards.schema_for(names, extras, of_turns=of_turns)
    return pa.Table.from_pylist(earlier.take(order).to_pylist(), schema)


def merged(earlier: pa.Table, again: pa.Table) -> pa.Table:
    """Return `earlier` with the rows of `again` in place of the rows without a reward; both in the
    same order."""
    scored = earlier.filter(earlier.column("reward").is_valid())
    table = pa.concat_tables([scored, again]).combine_chunks()
    ids = earlier.column("rollout_id").combine_chunks()
    return table.take(pc.index_in(ids, table.column("rollout_id").combine_chunks()))
