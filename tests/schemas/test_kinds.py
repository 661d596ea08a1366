"""Each kind's check: a good table passes; missing, extra, retyped, doubled, torn and non-finite
values are named."""

import pyarrow as pa
import pytest

from quiver.schemas import (
    advantages,
    evaluations,
    fields,
    logprobs,
    prompts,
    refs,
    rewards,
    rollouts,
    updates,
)
from quiver.schemas.errors import SchemaError


def rollouts_table(**changes) -> pa.Table:
    columns = {
        "rollout_id": ["a-0", "a-1"],
        "group_id": ["a", "a"],
        "sample_index": [0, 1],
        "prompt_ids": [[1, 5], [1, 5]],
        "completion_ids": [[7, 2], [9]],
        "old_logprobs": [[-0.5, -0.25], [-1.0]],
        "finish_reason": ["stop", "length"],
        "stop_reason": [None, None],
        "completion_text": ["7", "9"],
        "temperature": [1.0, 1.0],
        "seed": [3, 4],
    }
    return pa.table({**columns, **changes}, schema=rollouts.SCHEMA)


def test_each_kind_names_its_schemas_and_passes_a_good_table():
    kinds = (advantages, evaluations, logprobs, prompts, rewards, rollouts, updates)
    names = {module.__name__.rpartition(".")[2]: list(module.SCHEMAS) for module in kinds}
    assert set(names) == set(refs.KINDS) - {"policy"}
    count = {"prompts": 2, "rewards": 2, "rollouts": 4}
    for kind, schemas in names.items():
        assert schemas == [f"{kind}/{number + 1}" for number in range(count.get(kind, 1))]
    for module in kinds:
        for name, schema in module.SCHEMAS.items():
            assert fields.kind_of(module.check(schema.empty_table())) == name
    rollouts.check(rollouts_table())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_id": ["a-0", "a-0"]}, "'a-0' occurs more than once"),
        (
            {"old_logprobs": [[-0.5], [-1.0]]},
            "row 0: completion_ids has 2 items, old_logprobs has 1",
        ),
        (
            {"old_logprobs": [[-0.5, float("nan")], [-1.0]]},
            "old_logprobs holds nan: a finite number",
        ),
        ({"old_logprobs": [[-0.5, 0.5], [-1.0]]}, "old_logprobs holds 0.5: a logprob is at most 0"),
        ({"completion_ids": [[7, -1], [9]]}, "completion_ids holds -1"),
        (
            {"finish_reason": ["stop", "tired"]},
            "finish_reason holds tired: one of stop, length, abort",
        ),
        ({"temperature": [1.0, float("inf")]}, "temperature holds inf"),
    ],
)
def test_bad_values_are_named(changes, said):
    with pytest.raises(SchemaError, match="E-SCHEMA rollouts/1") as caught:
        rollouts.check(rollouts_table(**changes))
    assert said in caught.value.message


def test_the_difference_of_columns_is_shown():
    table = rollouts_table().drop(["seed"]).append_column("mood", pa.array(["x", "y"]))
    table = table.set_column(2, "sample_index", pa.array([0, 1], pa.int64()))
    with pytest.raises(SchemaError) as caught:
        rollouts.check(table)
    assert (
        caught.value.message
        == "missing seed; unexpected mood; sample_index is int64, expected int32"
    )


@pytest.mark.parametrize(
    ("field", "values", "why"),
    [
        (
            pa.field("old_logprobs", pa.list_(pa.float32())),
            [[None], [-1.0]],
            "is list<item: float>",
        ),
        (pa.field("group_id", pa.string()), ["a", None], "has 1 nulls, expected none"),
    ],
)
def test_nulls_are_refused_in_rows_and_in_lists(field, values, why):
    place = rollouts.SCHEMA.get_field_index(field.name)
    table = rollouts_table().set_column(place, field, pa.array(values, field.type))
    with pytest.raises(SchemaError, match=f"{field.name} {why}"):
        rollouts.check(table)


REWARD = {"rollout_id": "a", "group_id": "g", "reward": 1.0, "parts": {"f": 1.0}, "errors": {}}


def rewards_table(*extras, **changes) -> pa.Table:
    """One reward of the functions f and g."""
    schema = rewards.schema_for(["f", "g"], extras)
    return pa.Table.from_pylist([{**REWARD, **changes}], schema=schema)


def test_a_reward_may_be_null_and_have_extras():
    rewards.check(rewards_table(reward=None, errors={"f": "raised"}))
    table = rewards_table("f", extra={"f": '{"why": "x"}'})
    rewards.check(table)
    assert (rewards.names_of(table), rewards.names_of(table, "extra")) == (["f", "g"], ["f"])


TEXTS = pa.array([{"other": ""}], pa.struct({"other": pa.string()}))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (rewards_table(reward=float("inf")), "reward holds inf"),
        (rewards_table("nobody", extra={}), "extra must have names of functions"),
        (
            rewards_table().set_column(4, fields.required("errors", TEXTS.type), TEXTS),
            "errors is struct<other: string>, expected struct<f: string, g: string>",
        ),
        (
            rewards_table().append_column("extra", pa.array(["text"])),
            "unexpected extra",
        ),
    ],
)
def test_rewards_that_do_not_fit_are_named(table, why):
    with pytest.raises(SchemaError, match=why):
        rewards.check(table)


def test_a_check_makes_no_wider_copy_of_a_column():
    lists = {"completion_ids": [[7] * 100_000, []], "old_logprobs": [[-0.5] * 100_000, []]}
    table = rollouts_table(**lists)
    default_pool = pa.default_memory_pool()
    counting_pool = pa.proxy_memory_pool(default_pool)
    pa.set_memory_pool(counting_pool)
    try:
        rollouts.check(table)
    finally:
        pa.set_memory_pool(default_pool)
    assert 0 < counting_pool.max_memory() < 100_000


def test_tables_of_media_are_joined_with_room_for_more_than_two_gibibytes():
    files = [[{"bytes": b"a", "path": None}, {"bytes": b"", "path": "b"}], None, []]
    column = pa.array(files, prompts.BEYOND_TEXT.field("images").type)
    table = pa.table({"images": column, "group_id": ["a", "b", "c"]})
    chunks = pa.concat_tables([table, table.slice(1), table.slice(0, 1)])
    joined = prompts.with_large_files(chunks).combine_chunks()
    assert joined["images"].to_pylist() == [*files, *files[1:], files[0]]
    assert joined["images"].type.value_type.field("bytes").type == pa.large_binary()
