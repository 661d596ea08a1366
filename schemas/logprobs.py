"""logprobs/1: the logprobs of saved completions under a named checkpoint.

| column | type | meaning |
|---|---|---|
| rollout_id | string | joined by id |
| logprobs | list<float32> | one per completion id, at the row's temperature |

The manifest has the role (`ref` or `prox`) and the model's hash.

    {"rollout_id": "4be1c0de-sum-0017-2", "logprobs": [-0.29, -0.02]}
"""

import pyarrow as pa

from . import fields

SCHEMA = fields.kind_schema("logprobs/1", [fields.ROLLOUT_ID, fields.per_token("logprobs")])
SCHEMAS = fields.by_name(SCHEMA)


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`.

    Raises SchemaError unless it is logprobs/1: unique ids, every logprob finite and at most 0.
    """
    fields.compare(table, SCHEMA, unique="rollout_id")
    fields.require_logprobs(table, SCHEMA, "logprobs")
    return SCHEMA
