"""rewards/1: what each rollout is worth. Null is "not scored", never 0.

| column | type | meaning |
|---|---|---|
| rollout_id, group_id | string | joined by id, never by position |
| reward | float32, null | weighted, clipped sum; null: a part failed or none applied |
| parts | struct<float32, null> | a field a function, before its weight; null = none |
| errors | struct<string, null> | one field a reward function: why it failed; null = it did not |
| extra | struct<string, null> | JSON text of what a function gave beside the number |

    {"rollout_id": "4be1c0de-sum-0017-2", "group_id": "sum-0017", "reward": 1.2,
     "parts": {"accuracy": 1.0, "format": 1.0}, "errors": {"accuracy": null, "format": null}}
"""

import pyarrow as pa
import pyarrow.compute as pc

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


def schema_for(functions: list[str], extras: list[str] | tuple[str, ...] = ()) -> pa.Schema:
    """The schema of a rewards table with one part and one error for each function's name, and
    `extra` for `extras`, if any."""
    made = fields.with_struct(
        SCHEMA,
        parts=pa.struct(dict.fromkeys(functions, pa.float32())),
        errors=pa.struct(dict.fromkeys(functions, pa.string())),
    )
    texts = pa.struct(dict.fromkeys(extras, pa.string()))
    return made.append(fields.required("extra", texts)) if extras else made


def names_of(table: pa.Table, column: str = "parts") -> list[str]:
    """The functions' names in a struct column of a rewards table, in order; none where there is no
    such column."""
    return table.schema.field(column).type.names if column in table.column_names else []


def check(table: pa.Table) -> None:
    """Raise SchemaError unless `table` is rewards/1: unique ids, finite rewards, parts and errors
    of the same functions."""
    has_extra = "extra" in table.column_names
    fields.compare(table.drop_columns("extra") if has_extra else table, SCHEMA, unique="rollout_id")
    if has_extra and not pa.types.is_struct(table.schema.field("extra").type):
        raise fields.fail(SCHEMA, "extra must be a struct with one string a function")
    names = names_of(table)
    extras = names_of(table, "extra")
    if table.schema != schema_for(names, extras) or not set(extras) <= set(names):
        raise fields.fail(
            SCHEMA, "parts must be float32, errors and extra string, with the same function names"
        )
    fields.require_values(
        table,
        SCHEMA,
        "reward",
        lambda v: pc.invert(pc.is_finite(pc.fill_null(v, 0))),
        "a reward is finite or null",
    )
