"""rollouts/1 to /4: the policy's answers, token by token, with their sampling probabilities.

| column | type | meaning |
|---|---|---|
| rollout_id | string | unique; the same if the same work is done again |
| group_id, sample_index | string, int32 | the prompt, and the number of the sample |
| prompt_ids, completion_ids | list<int32> | as the engine saw and sampled them; the end token too |
| old_logprobs | list<float32> | one per completion id, in the distribution it was sampled from |
| finish_reason | string | stop, length or abort |
| stop_reason | string, null | the stop id or text, if the engine names one |
| completion_text | string | for people and rewards only; never tokenised again for the policy |
| temperature | float32 | the logits were divided by it |
| seed | int64 | the row's seed |

    {"rollout_id": "4be1c0de-sum-0017-2", "group_id": "sum-0017", "sample_index": 2,
    "completion_ids": [45, 2],
     "old_logprobs": [-0.31, -0.02], "finish_reason": "stop", "completion_text": "7", "temperature":
     1.0, …}

rollouts/2 are episodes of several turns. `completion_ids` and `old_logprobs` hold only the sampled
ids of all turns, one after another. `finish_reason`, `stop_reason` and `completion_text` are from
the last turn. There are two more columns:

| column | type | meaning |
|---|---|---|
| turns | list<struct> | at least one; the ids read between the sampled ids |
| end_reason | string | why the episode ended: one of `END_REASONS` |

| field of a turn | type | meaning |
|---|---|---|
| length | int32 | ids of `completion_ids` sampled in this turn; the lengths add up to all |
| text | string | of these ids, for people and rewards; never tokenised again |
| observation_ids | list<int32> | ids the model reads after them; empty if it reads no more |
| restart_ids | list<int32>, null | all ids it reads before them, if the history was rewritten |
| finish_reason | string | as above, for this turn |
| tool_calls | string, null | JSON of the calls that were read from it |
| parse_error | string, null | why none could be read |
| observation | string | the environment's answer, for people and rewards |
| reward | float32, null | reward of this turn; null: the environment gave none |
| info | string, null | JSON of the environment's other information |
| seconds | float32 | time that the environment took |

The model reads the prompt, then for each turn the sampled ids and the observation. With
`restart_ids` a new sequence begins, in the same rollout and for the same reward; the observation
before it is empty.

rollouts/3 are episodes in which an environment or tool may show pictures to the policy. There is
one more column:

| column | type | meaning |
|---|---|---|
| images | list<struct>, null | the pictures, in the order in which they are read |

| field of an image | type | meaning |
|---|---|---|
| turn | int32 | the turn whose `observation_ids` contain it, from 0 |
| start, length | int32 | position of its ids there |
| bytes | binary | a PNG, JPEG or WebP |

rollouts/4 are episodes in which it may also play clips. They have one more column, `audio`, of the
same form as `images`, with the bytes of a WAV, FLAC or MP3.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import fields
from .outside import MEDIA

FINISH_REASONS = ("stop", "length", "abort")
END_REASONS = (
    "answered",
    "environment",
    "max_turns",
    "max_tokens",
    "context",
    "max_observation_tokens",
    "max_tool_calls",
    "max_images",
    "max_audio",
    "parse_error",
    "timeout",
    "environment_error",
)
TURN = fields.kind_schema(
    "rollouts/2",
    [
        fields.required("length", pa.int32()),
        fields.required("text", pa.string()),
        fields.token_ids("observation_ids"),
        fields.token_ids("restart_ids").with_nullable(True),
        fields.required("finish_reason", pa.string()),
        pa.field("tool_calls", pa.string()),
        pa.field("parse_error", pa.string()),
        fields.required("observation", pa.string()),
        pa.field("reward", pa.float32()),
        pa.field("info", pa.string()),
        fields.required("seconds", pa.float32()),
    ],
)
"""The fields of a turn."""
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

OF_TURNS = fields.kind_schema(
    "rollouts/2",
    [
        *SCHEMA,
        fields.required("turns", pa.list_(fields.required("item", pa.struct(list(TURN))))),
        fields.required("end_reason", pa.string()),
    ],
)
_OBSERVED_FILE = [
    *(fields.required(name, pa.int32()) for name in ("turn", "start", "length")),
    fields.required("bytes", pa.binary()),
]
_OBSERVED_FILES = pa.list_(fields.required("item", pa.struct(_OBSERVED_FILE)))
OF_PICTURES = fields.kind_schema("rollouts/3", [*OF_TURNS, pa.field("images", _OBSERVED_FILES)])
OF_CLIPS = fields.kind_schema("rollouts/4", [*OF_PICTURES, pa.field("audio", _OBSERVED_FILES)])
SCHEMAS = fields.by_name(SCHEMA, OF_TURNS, OF_PICTURES, OF_CLIPS)
OF_EPISODES = tuple(map(fields.kind_of, (OF_TURNS, OF_PICTURES, OF_CLIPS)))
"""Names of the schemas that have turns."""


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`.

    Raises SchemaError unless ids are unique, each token has one finite logprob ≤ 0, finish reasons
    are known, and turns add up.
    """
    has_turns = not {"turns", "end_reason"}.isdisjoint(table.column_names)
    schema = OF_TURNS if has_turns else SCHEMA
    if has_turns and "images" in table.column_names:
        schema = OF_CLIPS if "audio" in table.column_names else OF_PICTURES
    fields.compare(table, schema, unique="rollout_id")
    fields.require_same_lengths(table, schema, "completion_ids", "old_logprobs")
    fields.require_logprobs(table, schema, "old_logprobs")
    fields.require_ids(table, schema, "prompt_ids")
    fields.require_ids(table, schema, "completion_ids")
    fields.require_among(table, schema, "finish_reason", FINISH_REASONS)
    fields.require_finite(table, schema, "temperature", least=0)
    if has_turns:
        fields.require_among(table, schema, "end_reason", END_REASONS)
        _check_turns(table)
    for column in MEDIA.values():
        if column in schema.names:
            _check_observed(table, column, schema)
    return schema


def _check_observed(table: pa.Table, column: str, schema: pa.Schema) -> None:
    """Raise SchemaError unless each file's ids are inside an observation of its own rollout."""
    for row, files in enumerate(table[column]):
        if not files.is_valid:
            continue
        turns = table["turns"][row]
        for turn, start, length in zip(
            *(files.values.field(name).to_pylist() for name in ("turn", "start", "length")),
            strict=True,
        ):
            has_turn = 0 <= turn < len(turns)
            room = len(turns[turn]["observation_ids"]) if has_turn else 0
            if not (start >= 0 and length >= 1 and start + length <= room):
                problem = f"row {row}: {column} has no ids at {start} of its turn {turn}"
                raise fields.fail(schema, problem)


def _check_turns(table: pa.Table) -> None:
    """Raise SchemaError unless each rollout's turns account for all of its sampled ids."""
    turns = pa.Table.from_struct_array(pc.list_flatten(table["turns"]))
    fields.compare(turns, TURN)
    fields.require_ids(turns, TURN, "observation_ids")
    fields.require_ids(turns, TURN, "restart_ids")
    fields.require_among(turns, TURN, "finish_reason", FINISH_REASONS)
    fields.require_finite(turns, TURN, "length", least=0)
    fields.require_finite(turns, TURN, "reward")
    fields.require_finite(turns, TURN, "seconds", least=0)
    counts = pc.list_value_length(table["turns"]).to_numpy()
    row_of = np.repeat(np.arange(len(counts)), counts)  # of each turn
    sums = np.bincount(row_of, turns["length"].to_numpy(), minlength=len(counts))
    is_first = np.diff(row_of, prepend=-1) != 0
    is_last = np.diff(row_of, append=len(counts)) != 0
    restarts = turns["restart_ids"].is_valid().to_numpy()
    restarts_next = np.roll(restarts, -1)  # the very last turn gets the first one's, and is_last
    is_empty = pc.equal(pc.list_value_length(turns["restart_ids"]), 0).fill_null(False).to_numpy()
    is_observed = pc.list_value_length(turns["observation_ids"]).to_numpy() > 0
    num_sampled = pc.list_value_length(table["completion_ids"]).to_numpy()
    for rows, problem in (
        (np.flatnonzero(counts == 0), "it has no turn, expected at least one"),
        (
            np.flatnonzero(sums != num_sampled),
            "the lengths of its turns do not add up to its completion_ids",
        ),
        (row_of[is_first & restarts], "a rollout begins with its prompt, not restart_ids"),
        (row_of[is_empty], "restart_ids is empty, expected ids or null"),
        (
            row_of[is_observed & (is_last | restarts_next)],
            "the last turn before an end or a restart has observation_ids, expected none",
        ),
    ):
        if len(rows):
            raise fields.fail(OF_TURNS, f"row {rows[0]}: {problem}")
