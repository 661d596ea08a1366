"""rewards/1, rewards/2: the reward of each rollout. Null means "not scored", never 0.

| column | type | meaning |
|---|---|---|
| rollout_id, group_id | string | joined by id, never by position |
| reward | float32, null | weighted, clipped sum, and overlong penalty; null: failed, or no number |
| parts | struct<float32, null> | one field per scorer, before its weight, and the penalty |
| errors | struct<string, null> | one field per scorer: why it failed; null = it did not |
| extra | struct<string, null> | only if a scorer gives more than the number: that, as JSON text |

    {"rollout_id": "4be1c0de-sum-0017-2", "group_id": "sum-0017", "reward": 1.2,
     "parts": {"accuracy": 1.0, "format": 1.0}, "errors": {"accuracy": null, "format": null}}

rewards/2 also give each turn's reward, in one more column:

| column | type | meaning |
|---|---|---|
| turn_rewards | list<float32>, null | one per turn, which add up to `reward`; null: not scored |
"""

import math

import pyarrow as pa

from . import fields

SCHEMA = fields.kind_schema(
    "rewards/1",
    [
        fields.ROLLOUT_ID,
        fields.GROUP_ID,
        pa.field("reward", pa.float32()),
        fields.open_struct("parts"),
        fields.open_struct("errors"),
    ],
)
OF_TURNS = fields.kind_schema(
    "rewards/2", [*SCHEMA, pa.field("turn_rewards", pa.list_(pa.float32()))]
)
SCHEMAS = fields.by_name(SCHEMA, OF_TURNS)


def schema_for(
    functions: list[str], extras: list[str] | tuple[str, ...] = (), *, of_turns: bool = False
) -> pa.Schema:
    """Return the schema of a rewards table for these functions.

    Args:
        functions: names of the reward functions; each has a part and an error.
        extras: names of functions with an `extra`; if empty, the column is left out.
        of_turns: if true, the table has `turn_rewards`.
    """
    made = fields.with_struct(
        OF_TURNS if of_turns else SCHEMA,
        parts=pa.struct(dict.fromkeys(functions, pa.float32())),
        errors=pa.struct(dict.fromkeys(functions, pa.string())),
    )
    texts = pa.struct(dict.fromkeys(extras, pa.string()))
    return made.append(fields.required("extra", texts)) if extras else made


def names_of(table: pa.Table, column: str = "parts") -> list[str]:
    """Return the functions' names in a struct column, in order; empty without such a column."""
    has_names = column in table.column_names and pa.types.is_struct(table[column].type)
    return table[column].type.names if has_names else []


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`.

    Raises SchemaError unless ids are unique, rewards finite, parts and errors from the same
    functions, and turn rewards add up.
    """
    of_turns = "turn_rewards" in table.column_names
    schema = OF_TURNS if of_turns else SCHEMA
    names = names_of(table)
    extras = names_of(table, "extra")
    fields.compare(table, schema_for(names, extras, of_turns=of_turns), unique="rollout_id")
    if not set(extras) <= set(names):
        raise fields.fail(schema, "extra must have names of functions that parts have")
    fields.require_finite(table, schema, "reward")
    if of_turns:
        fields.require_finite(table, schema, "turn_rewards")
        _check_sums(table)
    return schema


def _check_sums(table: pa.Table) -> None:
    """Raise SchemaError unless the turn rewards of each scored rollout add up to its reward."""
    for row, (reward, turns) in enumerate(
        zip(table["reward"].to_pylist(), table["turn_rewards"].to_pylist(), strict=True)
    ):
        if reward is None or turns is None:
            continue
        earned = [turn for turn in turns if turn is not None]
        total = math.fsum(earned)
        rounding = 1e-6 * max(map(abs, earned), default=0.0)  # they are float32
        if not math.isclose(total, reward, rel_tol=1e-4, abs_tol=1e-4 + rounding):
            problem = f"row {row}: turn_rewards add up to {total:g}, the reward is {reward:g}"
            raise fields.fail(OF_TURNS, problem)
