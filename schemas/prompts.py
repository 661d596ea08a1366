"""prompts/1: what the model is asked, rendered to ids once, before any GPU.

| column | type | meaning |
|---|---|---|
| group_id | string | the prompt; all rollouts of one prompt are a group |
| messages | list<struct<role, content>>, null | the chat, where one was given |
| prompt_text | string | the rendered text, for people |
| prompt_ids | list<int32> | what the engine gets; exactly one BOS where the model has one |
| columns | struct | the user's own columns, untouched; rewards get them by name |

    {"group_id": "sum-0017", "messages": [{"role": "user", "content": "3 + four?"}], "prompt_text":
    "<|im_start|>user…",
     "prompt_ids": [1, 4093, …], "columns": {"answer": 7}}
"""

import pyarrow as pa

from . import fields

MESSAGES = pa.list_(fields.required("item", pa.struct([fields.ROLE, fields.CONTENT])))
SCHEMA = fields.kind_schema(
    "prompts/1",
    [
        fields.GROUP_ID,
        pa.field("messages", MESSAGES),
        fields.required("prompt_text", pa.string()),
        fields.token_ids("prompt_ids"),
        fields.open_struct("columns"),
    ],
)


def check(table: pa.Table) -> None:
    """Raise SchemaError unless `table` is prompts/1 with unique group ids and non-negative,
    non-empty prompts."""
    fields.compare(table, SCHEMA, unique="group_id")
    fields.require_ids(table, SCHEMA, "prompt_ids")
