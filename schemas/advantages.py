"""advantages/1: each rollout's weight in the optimizer, and if it was used or dropped.

| column | type | meaning |
|---|---|---|
| rollout_id | string | joined by id |
| advantage | float32, null | or list<float32>, one per token, for PPO; null if dropped |
| kept | bool | true if it took part in the update |
| drop_reason | string, null | not_scored, small_group, zero_variance, empty, … |
| mean_ratio | float32, null | mean of π_θ / π_old when last trained on, or of the new policy |
| mean_logprob | float32, null | mean logprob of its tokens under the same π_θ |

    {"rollout_id": "4be1c0de-sum-0017-2", "advantage": 0.71, "kept": true, "drop_reason": null,
     "mean_ratio": 1.0, "mean_logprob": -0.4}
"""

import pyarrow as pa

from . import fields

SCHEMA = fields.kind_schema(
    "advantages/1",
    [
        fields.ROLLOUT_ID,
        pa.field("advantage", pa.float32()),
        fields.required("kept", pa.bool_()),
        pa.field("drop_reason", pa.string()),
        pa.field("mean_ratio", pa.float32()),
        pa.field("mean_logprob", pa.float32()),
    ],
)
PER_TOKEN = SCHEMA.set(1, pa.field("advantage", pa.list_(pa.float32())))
SCHEMAS = fields.by_name(SCHEMA)


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`.

    Raises SchemaError unless it is advantages/1, with one value per rollout or one per token.
    """
    listed = "advantage" in table.column_names and pa.types.is_list(table.column("advantage").type)
    fields.compare(table, PER_TOKEN if listed else SCHEMA, unique="rollout_id")
    return SCHEMA
