"""rollouts/1: what the policy answered, token by token, with the probability it had when it was
sampled.

| column | type | meaning |
|---|---|---|
| rollout_id | string | unique, the same for the same work done again |
| group_id, sample_index | string, int32 | the prompt, and which of its samples |
| prompt_ids, completion_ids | list<int32> | as the engine saw and sampled them; the end token too |
| old_logprobs | list<float32> | of each completion id, in the distribution it was sampled from |
| finish_reason | string | stop, length or abort |
| stop_reason | string, null | the stop id or text, where the engine names one |
| completion_text | string | for people and rewards only; never tokenised again for the policy |
| temperature | float32 | the logits were divided by it |
| seed | int64 | of this row |

    {"rollout_id": "4be1c0de-sum-0017-2", "group_id": "sum-0017", "sample_index": 2,
    "completion_ids": [45, 2],
     "old_logprobs": [-0.31, -0.02], "finish_reason": "stop", "completion_text": "7", "temperature":
     1.0, …}
"""

import pyarrow as pa
import pyarrow.compute as pc

from . import fields

FINISH_REASONS = ("stop", "length", "abort")
SCHEMA = fields.kind_schema(
    "rollouts/1",
    [
        fields.ROLLOUT_ID,
        fields.GROUP_ID,
        fields.SAMPLE_INDEX,
        fields.token_ids("prompt_ids"),
        fields.token_ids("completion_ids"),
        fields.per_token("old_logprobs"),
        fields.required("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        fields.required("completion_text", pa.string()),
        fields.required("temperature", pa.float32()),
        fields.required("seed", pa.int64()),
    ],
)


def check(table: pa.Table) -> None:
    """Raise SchemaError unless `table` is rollouts/1: unique ids, one finite logprob ≤ 0 a token,
    known finish reasons."""
    fields.compare(table, SCHEMA, unique="rollout_id")
    fields.require_same_lengths(table, SCHEMA, "completion_ids", "old_logprobs")
    fields.require_logprobs(table, SCHEMA, "old_logprobs")
    fields.require_ids(table, SCHEMA, "prompt_ids")
    fields.require_ids(table, SCHEMA, "completion_ids")
    known = pa.array(FINISH_REASONS)
    fields.require_values(
        table,
        SCHEMA,
        "finish_reason",
        lambda v: pc.invert(pc.is_in(v, known)),
        f"one of {', '.join(FINISH_REASONS)}",
    )
    fields.require_values(
        table,
        SCHEMA,
        "temperature",
        lambda v: pc.or_(pc.invert(pc.is_finite(v)), pc.less(v, 0)),
        "finite and at least 0",
    )
