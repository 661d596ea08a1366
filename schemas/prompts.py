"""prompts/1, prompts/2: the model's prompts, rendered to ids once, before any GPU is used.

Not of the spine: rollouts repeat the ids that a training reads.

| column | type | meaning |
|---|---|---|
| group_id | string | the prompt; all rollouts of one prompt are a group |
| messages | list<struct<role, content>>, null | the chat given to the template, if any |
| prompt_text | string | the rendered text, for people |
| prompt_ids | list<int32> | input of the engine; exactly one BOS if the model has one |
| columns | struct | the user's own columns; rewards get their values by name (`cells.py`) |

    {"group_id": "sum-0017", "messages": [{"role": "user", "content": "3 + four?"}], "prompt_text":
    "<|im_start|>user…",
     "prompt_ids": [1, 4093, …], "columns": {"answer": 7}}

`messages` begin with the recipe's system message and end with an environment's opening message. A
last message of the assistant is left out, and the policy continues it.

prompts/2 are written if chats have more than roles and contents, rows show pictures or play clips,
the template gets tools, or an environment answers. Messages then have four more fields, strings or
null: `tool_calls` (JSON), an assistant's thinking as `reasoning_content`, and for a tool's answer
`tool_call_id` and the tool's `name`. There are four more columns:

| column | type | meaning |
|---|---|---|
| tools | string, null | JSON of the tools given to the template |
| images | list<struct<bytes, path>>, null | a prompt's pictures, as `datasets.Image` stores them |
| audio | list<struct<bytes, path>>, null | its clips, as `datasets.Audio` stores them |
| spans | list<struct<modality, start, length>>, null | where their ids are in `prompt_ids` |

Spans are in order of `start`. The first span of a modality belongs to the first file in its column
of `MEDIA`.

If an environment answers, `columns` have one more text, `quiver_opening`: JSON of the environment's
opening messages. It must open the same way again.

A prompt may be the beginning of a saved episode, up to a turn that is to be sampled again. Its
`columns` then have two more texts, from which the environment is brought to that state:

| in `columns` | meaning |
|---|---|
| quiver_turns | JSON of the turns that it had answered, and of its answers |
| quiver_group | the group_id of the episode, which gives the environment's seed |

A turn of `quiver_turns` is {text, calls: [{name, arguments}], observation, cut, reward}; `cut`
characters of the observation are left out.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from . import fields, outside
from .outside import MEDIA

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
"""Columns that Quiver adds to the user's."""
_MORE = [pa.field(name, pa.string()) for name in outside.MORE]
MESSAGES_WITH_MORE = pa.list_(
    fields.required("item", pa.struct([fields.ROLE, fields.CONTENT, *_MORE]))
)
_FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_SPAN = pa.struct(
    [
        fields.required("modality", pa.string()),
        *(fields.required(name, pa.int32()) for name in ("start", "length")),
    ]
)
BEYOND_TEXT = fields.kind_schema(
    "prompts/2",
    [
        *SCHEMA.set(1, pa.field("messages", MESSAGES_WITH_MORE)),
        pa.field("tools", pa.string()),
        *(pa.field(name, pa.list_(fields.required("item", _FILE))) for name in MEDIA.values()),
        pa.field("spans", pa.list_(fields.required("item", _SPAN))),
    ],
)
SCHEMAS = fields.by_name(SCHEMA, BEYOND_TEXT)
_MOST_LISTED_BYTES = 2**20
"""Of the dropped groups in one manifest, which may have 8 MiB."""


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`.

    Raises SchemaError unless group ids are unique and prompts hold no negative id. Empty prompts
    are refused by the stages that read them.
    """
    schema = BEYOND_TEXT if "tools" in table.column_names else SCHEMA
    fields.compare(table, schema, unique="group_id")
    fields.require_ids(table, schema, "prompt_ids")
    return schema


def table_of(
    rows: list[dict[str, Any]], columns: pa.StructArray, schema: pa.Schema = BEYOND_TEXT
) -> pa.Table:
    """Return rows of prompts, which lack `columns`, with the user's `columns`."""
    place = schema.get_field_index("columns")
    table = pa.Table.from_pylist(rows, schema.remove(place))
    return table.add_column(place, fields.required("columns", columns.type), columns)


def token_counts(tables: Iterable[pa.Table]) -> dict[str, float]:
    """Return `min`, `max` and `mean` of the number of tokens of all prompts, at least one."""
    ids = pa.concat_tables(table.select(["prompt_ids"]) for table in tables)["prompt_ids"]
    lengths = pc.list_value_length(ids)
    return {**pc.min_max(lengths).as_py(), "mean": pc.mean(lengths).as_py()}


def listed(dropped: Sequence[str]) -> list[str]:
    """Return the dropped groups that a manifest lists: a curriculum must not ask them again. These
    are all, or the first ones if their names have more than 1 MiB."""
    sizes = accumulate(len(group.encode()) for group in dropped)
    return [group for group, size in zip(dropped, sizes, strict=True) if size <= _MOST_LISTED_BYTES]


def most_media(table: pa.Table) -> dict[str, int]:
    """Return the most files of one prompt, for each modality that has any."""
    columns = {name: column for name, column in MEDIA.items() if column in table.column_names}
    most = {name: pc.max(pc.list_value_length(table[columns[name]])).as_py() for name in columns}
    return {name: count for name, count in most.items() if count}


def with_large_files(table: pa.Table) -> pa.Table:
    """Return `table` with 64-bit offsets for the bytes of media, which are not copied.

    Joined chunks, and rows that are taken, may then have more than 2 GiB of them.
    """
    for number, name in enumerate(table.column_names):
        if name in MEDIA.values():
            item = table[name].type.value_field
            parts = [
                part.with_type(pa.large_binary()) if part.name == "bytes" else part
                for part in item.type
            ]
            kind = pa.list_(item.with_type(pa.struct(parts)))
            table = table.set_column(number, name, table[name].cast(kind))
    return table
