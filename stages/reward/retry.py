"""Rewards taken over from an earlier version of the same rollouts: only rows that have none are
scored again.

What is taken over (reward, parts, errors, extra) is so byte for byte. So the recipe must name the
same parts and weigh them as the earlier one did; a function's own code and arguments may differ,
since mending them is what a retry is for.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rewards
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.store import Version


def require_same(
    earlier: Version, rollouts: Version, names: list[str], config: dict[str, Any]
) -> None:
    """LineageError unless `earlier` was made of `rollouts`; ConfigError unless it has the parts
    `names`, weighed as in `config`."""
    entry = earlier.manifest.input("rollouts")
    if entry is None or entry.content_hash != rollouts.manifest.content_hash:
        what = f"was made of {entry.ref if entry else 'no rollouts'}, not of {rollouts.ref}"
        raise LineageError(
            str(earlier.ref), what, next=f"name rewards of {rollouts.ref}, or leave --retry out"
        )
    if earlier.manifest.stage == "override":
        replaced = earlier.manifest.input("rewards").ref
        what = f"a person replaced rewards of {replaced} in it: what is scored again belongs there"
        raise ConfigError(
            f"--retry {earlier.ref}", what, next=f"--retry {replaced}, then override again"
        )
    before = rewards.names_of(earlier.table())
    if set(before) != set(names):
        gone, new = sorted(set(before) - set(names)), sorted(set(names) - set(before))
        told = [f"the recipe lacks {', '.join(gone)}"] * bool(gone) + [
            f"they lack {', '.join(new)}"
        ] * bool(new)
        raise ConfigError(
            f"--retry {earlier.ref}",
            f"these rewards have other parts than the recipe: {'; '.join(told)}",
            next="restore [reward] as it was, or leave --retry out to score all rows",
        )
    for what, wanted in _arithmetic(config).items():
        found = _arithmetic(earlier.manifest.config)[what]
        if found != wanted:
            raise ConfigError(
                f"--retry {earlier.ref}",
                f"{what} was {found} there and is {wanted} in the recipe: the rewards of one "
                "group would not be comparable",
                next="restore [reward] as it was, or leave --retry out to score all rows",
            )


def _arithmetic(config: dict[str, Any]) -> dict[str, Any]:
    """What a config makes of the parts."""
    scorers = [
        each
        for listed in config.values()
        if isinstance(listed, list)
        for each in listed
        if isinstance(each, dict)
    ]
    weights = {f"weight of {each['name']}": each["weight"] for each in scorers}
    return {**weights, "reward_clip": config.get("reward_clip"), "overlong": config.get("overlong")}


def aligned(earlier: pa.Table, rollouts: pa.Table, names: list[str], extras: list[str]) -> pa.Table:
    """The earlier rewards in the order of `rollouts`, joined by id, their parts in the order of
    `names`. LineageError."""
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
    table, schema = earlier.combine_chunks().take(order), rewards.schema_for(names, extras)
    columns = [
        _reordered(table, field) if pa.types.is_struct(field.type) else table.column(field.name)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _reordered(table: pa.Table, wanted: pa.Field) -> pa.ChunkedArray:
    """A struct column with the fields of `wanted`, null where it lacks one."""
    have = rewards.names_of(table, wanted.name)

    def array(name: str) -> pa.Array:
        if name not in have:
            return pa.nulls(table.num_rows, pa.string())
        return pc.struct_field(table.column(wanted.name), [have.index(name)]).combine_chunks()

    return pa.StructArray.from_arrays(
        [array(field.name) for field in wanted.type], fields=list(wanted.type)
    )


def merged(earlier: pa.Table, again: pa.Table) -> pa.Table:
    """`earlier`, with the rows of `again` in place of those without a reward; both in the same
    order."""
    kept = earlier.filter(earlier.column("reward").is_valid())
    whole = pa.concat_tables([kept, again]).combine_chunks()
    ids = earlier.column("rollout_id").combine_chunks()
    return whole.take(pc.index_in(ids, whole.column("rollout_id").combine_chunks()))
