"""prompts/1, prompts/2: what the model is asked, rendered to ids once, before any GPU.

| column | type | meaning |
|---|---|---|
| group_id | string | the prompt; all rollouts of one prompt are a group |
| messages | list<struct<role, content>>, null | the chat that the template was given, if one was |
| prompt_text | string | the rendered text, for people |
| prompt_ids | list<int32> | what the engine gets; exactly one BOS where the model has one |
| columns | struct | the user's own columns; rewards get their values by name (`cells.py`) |

    {"group_id": "sum-0017", "messages": [{"role": "user", "content": "3 + four?"}], "prompt_text":
    "<|im_start|>user…",
     "prompt_ids": [1, 4093, …], "columns": {"answer": 7}}

`messages` begin with the recipe's system message, end with what an environment says at the start,
and lack a last message of the assistant, which the policy continues.

prompts/2 are written if chats have more than roles and contents, rows show pictures, the template
is given tools, or an environment answers. Messages have four fields more, strings or null:
`tool_calls` (JSON), an assistant's thinking as `reasoning_content`, and of what a tool answered
`tool_call_id` and the tool's `name`. There are three columns more:

| column | type | meaning |
|---|---|---|
| tools | string, null | JSON of the tools that the template was given |
| images | list<struct<bytes, path>>, null | a prompt's pictures, as `datasets.Image` stores them |
| image_spans | list<struct<start, length>>, null | where their ids stand in `prompt_ids` |

Where an environment answers, `columns` have one text more, with which it must begin again:
`quiver_opening`, JSON of the messages that it began with.

A prompt may be the beginning of a saved episode, up to a turn that is to be sampled anew. Its
`columns` then have two texts more, by which the environment is brought to that place:

| in `columns` | meaning |
|---|---|
| quiver_turns | JSON of the turns that it had answered, and of what it said |
| quiver_group | the group_id of the episode, which gives the environment's seed |

A turn of `quiver_turns` is {text, calls: [{name, arguments}], observation, cut, reward}; `cut`
characters of the observation are left out.
"""

import pyarrow as pa
import pyarrow.compute as pc

from . import fields, outside

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
PLAYED_TURNS = "quiver_turns"
PLAYED_GROUP = "quiver_group"
OPENING = "quiver_opening"
OURS = (PLAYED_TURNS, PLAYED_GROUP, OPENING)
"""Columns that are not the user's."""
_MORE = [pa.field(name, pa.string()) for name in outside.MORE]
MESSAGES_WITH_MORE = pa.list_(
    fields.required("item", pa.struct([fields.ROLE, fields.CONTENT, *_MORE]))
)
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_SPAN = pa.struct([fields.required(name, pa.int32()) for name in ("start", "length")])
BEYOND_TEXT = fields.kind_schema(
    "prompts/2",
    [
        *SCHEMA.set(1, pa.field("messages", MESSAGES_WITH_MORE)),
        pa.field("tools", pa.string()),
        pa.field("images", pa.list_(fields.required("item", _IMAGE))),
        pa.field("image_spans", pa.list_(fields.required("item", _SPAN))),
    ],
)
SCHEMAS = fields.by_name(SCHEMA, BEYOND_TEXT)


def check(table: pa.Table) -> pa.Schema:
    """The schema that `table` is of: unique group ids, prompts that are not empty and hold no
    negative id. SchemaError."""
    schema = BEYOND_TEXT if "tools" in table.column_names else SCHEMA
    fields.compare(table, schema, unique="group_id")
    fields.require_ids(table, schema, "prompt_ids")
    return schema


def most_images(table: pa.Table) -> int:
    """Of one prompt; 0 where none shows any, or `table` has no such column."""
    if "images" not in table.column_names:
        return 0
    return pc.max(pc.list_value_length(table["images"])).as_py() or 0
