"""rollouts/2, rewards/2 and prompts/2 beside the first versions: what passes, what is refused, and
how a version says which it is."""

import pyarrow as pa
import pytest

from quiver.flows.verification import verify
from quiver.schemas import fields, prompts, rewards, rollouts
from quiver.schemas.errors import SchemaError
from quiver.schemas.fields import kind_of
from tests import episodes
from tests.episodes import turn

ROW = {
    "rollout_id": "a-0",
    "group_id": "a",
    "sample_index": 0,
    "prompt_ids": [1, 5],
    "completion_ids": [7, 2, 9],
    "old_logprobs": [-0.5, -0.25, -1.0],
    "finish_reason": "stop",
    "stop_reason": None,
    "completion_text": "9",
    "temperature": 1.0,
    "seed": 3,
}
TURNS = [turn(2, [11, 12], observation="no", reward=0.5), turn(1)]


def table_of(**changes) -> pa.Table:
    row = {**ROW, "turns": TURNS, "end_reason": "answered", **changes}
    return pa.Table.from_pylist([row], schema=rollouts.OF_TURNS)


IMAGE = {"turn": 0, "start": 1, "length": 1, "bytes": b"x"}


def with_images(*images) -> pa.Table:
    row = {**ROW, "turns": TURNS, "end_reason": "answered", "images": list(images)}
    return pa.Table.from_pylist([row], schema=rollouts.OF_PICTURES)


def test_pictures_stand_in_observations():
    assert kind_of(rollouts.check(with_images(IMAGE))) == "rollouts/3"
    none = with_images().set_column(
        with_images().schema.get_field_index("images"),
        rollouts.OF_PICTURES.field("images"),
        pa.nulls(1, rollouts.OF_PICTURES.field("images").type),
    )
    assert kind_of(rollouts.check(none)) == "rollouts/3"


def test_clips_stand_there_too():
    row = {**ROW, "turns": TURNS, "end_reason": "max_audio", "images": None, "audio": [IMAGE]}
    assert kind_of(rollouts.check(pa.Table.from_pylist([row], rollouts.OF_CLIPS))) == "rollouts/4"
    row["audio"] = [{**IMAGE, "turn": 1}]
    with pytest.raises(SchemaError, match="row 0: audio has no ids at 1 of its turn 1"):
        rollouts.check(pa.Table.from_pylist([row], rollouts.OF_CLIPS))


@pytest.mark.parametrize(
    "change",
    [
        {"turn": 2},
        {"turn": -1},
        {"turn": 1},  # what follows the last turn is read by nobody
        {"start": -1},
        {"length": 2},
        {"length": 0},
    ],
)
def test_a_picture_beside_its_observation_is_refused(change):
    with pytest.raises(SchemaError, match="row 0: images has no ids at"):
        rollouts.check(with_images({**IMAGE, **change}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"turns": []}, "row 0: it has no turn"),
        ({"turns": TURNS[:1]}, "row 0: the lengths of its turns do not add up"),
        ({"turns": [turn(4), turn(-1)]}, "length holds -1: at least 0"),
        ({"turns": [turn(2, [-3]), turn(1)]}, "observation_ids holds -3"),
        ({"turns": [turn(2, [4]), turn(1, [4])]}, "row 0: the last turn before an end"),
        (
            {"turns": [turn(2, [4]), turn(1, restart_ids=[8])]},
            "row 0: the last turn before an end or a restart has observation_ids",
        ),
        ({"turns": [turn(3, restart_ids=[8])]}, "row 0: a rollout begins with its prompt"),
        ({"turns": [turn(2), turn(1, restart_ids=[])]}, "row 0: restart_ids is empty"),
        ({"turns": [turn(3, finish_reason="tired")]}, "finish_reason holds tired: one of stop"),
        ({"turns": [turn(3, reward=float("nan"))]}, "reward holds nan: a finite number"),
        ({"turns": [turn(3, seconds=-1.0)]}, "seconds holds -1.0: at least 0"),
        ({"end_reason": "bored"}, "end_reason holds bored: one of answered, environment"),
    ],
)
def test_turns_that_do_not_fit_are_named(changes, problem):
    with pytest.raises(SchemaError, match="E-SCHEMA rollouts/2") as caught:
        rollouts.check(table_of(**changes))
    assert problem in caught.value.message


def test_the_row_of_a_problem_is_told():
    good = table_of()
    bad = table_of(rollout_id="a-1", turns=[turn(2), turn(1, restart_ids=[])])
    with pytest.raises(SchemaError, match="row 1: restart_ids is empty"):
        rollouts.check(pa.concat_tables([good, bad]))


def test_a_turn_may_not_be_null():
    nullable = pa.struct([field.with_nullable(True) for field in rollouts.TURN])
    rows = [{**part, "length": None} for part in TURNS]
    column = pa.array([rows], pa.list_(nullable))
    table = table_of().drop_columns("turns")
    with pytest.raises(SchemaError, match="turns is list"):
        rollouts.check(table.append_column("turns", column))


@pytest.mark.parametrize(
    ("reward", "turn_rewards", "why"),
    [
        (1.0, [0.25, None, 0.75], ""),
        (None, None, ""),
        (None, [1.0], ""),
        (1.0, [12345.67, 1010.13, 5.5, 1.0 - (12345.67 + 1010.13 + 5.5)], ""),  # as float32
        (1.0, [12345.67, 1010.13, 5.5, -13361.3], "turn_rewards add up to 0"),
        (1.0, [0.5], r"turn_rewards add up to 0\.5, the reward is 1"),
        (1.0, [float("inf")], "turn_rewards holds inf: a finite number"),
    ],
)
def test_rewards_of_turns_add_up(reward, turn_rewards, why):
    row = {"rollout_id": "a-0", "group_id": "a", "reward": reward, "turn_rewards": turn_rewards}
    row |= {"parts": {"f": reward}, "errors": {}, "extra": {}}
    schema = rewards.schema_for(["f"], ["f"], of_turns=True)
    table = pa.Table.from_pylist([row], schema=schema)
    if why:
        with pytest.raises(SchemaError, match=why):
            rewards.check(table)
    else:
        assert kind_of(rewards.check(table)) == "rewards/2"


def test_prompts_with_calls_and_pictures():
    call = {"role": "assistant", "content": "", "tool_calls": '[{"name": "add"}]'}
    answer = {"role": "tool", "content": "7", "tool_call_id": "1", "name": "add"}
    row = {
        "group_id": "a",
        "messages": [call, answer],
        "prompt_text": "",
        "prompt_ids": [1, 9, 9],
        "columns": {"n": 1},
        "tools": "[]",
        "images": [{"bytes": b"x", "path": None}],
        "spans": [{"modality": "image", "start": 1, "length": 2}],
    }
    schema = fields.with_struct(prompts.BEYOND_TEXT, columns=pa.struct({"n": pa.int64()}))
    nulls = dict.fromkeys(("tools", "images", "audio", "spans"))
    table = pa.Table.from_pylist([row, {**row, "group_id": "b", **nulls}], schema=schema)
    assert kind_of(prompts.check(table)) == "prompts/2"


def test_a_version_with_turns_says_so(store, policy, monkeypatch):
    """The files are of the schema that its manifest names, or it is corrupt."""
    rows = [{**ROW, "turns": TURNS, "end_reason": "answered"}]
    version = episodes.write(store, policy, rows)
    assert version.manifest.kind_schema == "rollouts/2"
    assert version.table().to_pylist() == rows
    assert episodes.write(store, policy, [ROW]).manifest.kind_schema == "rollouts/1"
    assert verify(store)[1] == []
    monkeypatch.setattr("quiver.stages.core.store.writer.kind_of", lambda _: "rollouts/1")
    episodes.write(store, policy, [{**rows[0], "rollout_id": "a-1"}])
    (error,) = verify(store)[1]
    assert "says rollouts/1, its files are rollouts/2" in str(error)
