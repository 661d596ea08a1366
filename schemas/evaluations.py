"""evaluations/1: held-out scores; the manifest has score, standard error, n and pass@k.

| column | type | meaning |
|---|---|---|
| group_id, sample_index | string, int32 | the held-out prompt, and the number of the sample |
| rollout_id | string | the evaluation's rollout |
| score | float32, null | null = left out; a cut answer scores as `evaluate.unscored` says |
| completion_tokens | int32 | length of the completion |
| finish_reason | string | stop, length or abort |

    {"group_id": "held-0003", "sample_index": 0, "rollout_id": "77aa01c2-held-0003-0", "score": 1.0,
     "completion_tokens": 6, "finish_reason": "stop"}
"""

import pyarrow as pa

from . import fields

SCHEMA = fields.kind_schema(
    "evaluations/1",
    [
        fields.GROUP_ID,
        fields.SAMPLE_INDEX,
        fields.ROLLOUT_ID,
        pa.field("score", pa.float32()),
        fields.required("completion_tokens", pa.int32()),
        fields.required("finish_reason", pa.string()),
    ],
)
SCHEMAS = fields.by_name(SCHEMA)


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`.

    Raises SchemaError unless it is evaluations/1 with unique rollout ids.
    """
    fields.compare(table, SCHEMA, unique="rollout_id")
    return SCHEMA
