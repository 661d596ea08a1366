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
    count = {"prompts": 2, "rewards": 2, "rollouts": 3}
    for kind, schemas in names.items():
        assert schemas == [f"{kind}/{number + 1}" for number in range(count.get(kind, 1))]
    for module in kinds:
        for name, schema in module.SCHEMAS.items():
            assert fields.kind_of(module.check(schema.empty_table())) == name
    rollouts.check(rollouts_table())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_id": ["a-0", "a-0"]}, "'a-0' stands more than once"),
        (
            {"old_logprobs": [[-0.5], [-1.0]]},
            "row 0: completion_ids has 2 items, old_logprobs has 1",
        ),
        (
            {"old_logprobs": [[-0.5, float("nan")], [-1.0]]},
            "old_logprobs holds nan: a logprob is finite",
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


def test_nulls_are_refused_in_rows_and_in_lists():
    loose = pa.schema(
        [
            *list(rollouts.SCHEMA)[:5],
            pa.field("old_logprobs", pa.list_(pa.float32())),
            *list(rollouts.SCHEMA)[6:],
        ]
    )
    rows = rollouts_table().to_pydict() | {"old_logprobs": [[-0.5, None], [-1.0]]}
    with pytest.raises(SchemaError, match="old_logprobs is list<item: float>"):
        rollouts.check(pa.table(rows, schema=loose))
    nameless = rollouts_table().set_column(
        1, pa.field("group_id", pa.string()), pa.array(["a", None])
    )
    with pytest.raises(SchemaError, match="group_id has 1 nulls, expected none"):
        rollouts.check(nameless)


def test_a_null_reward_is_not_zero_and_parts_match_errors():
    schema = rewards.schema_for(["accuracy"])
    rows = {"rollout_id": ["a", "b"], "group_id": ["g", "g"], "reward": [1.0, None]}
    good = pa.table(
        {
            **rows,
            "parts": [{"accuracy": 1.0}, {"accuracy": None}],
            "errors": [{}, {"accuracy": "raised"}],
        },
        schema=schema,
    )
    rewards.check(good)
    assert good["reward"].null_count == 1
    other = pa.struct([pa.field("format", pa.string())])
    swapped = good.set_column(
        4, pa.field("errors", other, nullable=False), pa.array([{}, {}], other)
    )
    with pytest.raises(SchemaError, match="same function names"):
        rewards.check(swapped)
    infinite = pa.table(
        {**rows, "reward": [1.0, float("inf")], "parts": [{}, {}], "errors": [{}, {}]},
        schema=schema,
    )
    with pytest.raises(SchemaError, match="reward holds inf"):
        rewards.check(infinite)


def test_extra_may_stand_beside_rewards():
    rows = {
        "rollout_id": ["a"],
        "group_id": ["g"],
        "reward": [1.0],
        "parts": [{"judge": 1.0}],
        "errors": [{}],
    }
    good = pa.table(
        {**rows, "extra": [{"judge": '{"why": "x"}'}]},
        schema=rewards.schema_for(["judge", "other"], ["judge"]),
    )
    rewards.check(good)
    assert (rewards.names_of(good), rewards.names_of(good, "extra")) == (
        ["judge", "other"],
        ["judge"],
    )
    foreign = pa.table({**rows, "extra": [{}]}, schema=rewards.schema_for(["judge"], ["nobody"]))
    with pytest.raises(SchemaError, match="same function names"):
        rewards.check(foreign)
    with pytest.raises(SchemaError, match="extra must be a struct"):
        rewards.check(foreign.set_column(5, "extra", pa.array(["text"])))


def test_prompts_keep_the_users_columns():
    struct = pa.struct([pa.field("answer", pa.int64()), pa.field("level", pa.string())])
    schema = fields.with_struct(prompts.SCHEMA, columns=struct)
    rows = {
        "group_id": ["a"],
        "messages": [[{"role": "user", "content": "3 + 4?"}]],
        "prompt_text": ["3 + 4?"],
        "prompt_ids": [[1]],
    }
    table = pa.table({**rows, "columns": [{"answer": 7, "level": "easy"}]}, schema=schema)
    prompts.check(table)
    assert table["columns"][0].as_py() == {"answer": 7, "level": "easy"}


def test_a_check_makes_no_wider_copy_of_a_column():
    ids = pa.array([[7] * 100_000])
    logprobs_column = pa.array([[-0.5] * 100_000])
    table = rollouts_table().slice(0, 1).drop(["completion_ids", "old_logprobs"])
    table = table.append_column("completion_ids", ids).append_column(
        "old_logprobs", logprobs_column
    )
    table = table.select(rollouts.SCHEMA.names).cast(rollouts.SCHEMA)
    default_pool = pa.default_memory_pool()
    counting_pool = pa.proxy_memory_pool(default_pool)
    pa.set_memory_pool(counting_pool)
    try:
        rollouts.check(table)
    finally:
        pa.set_memory_pool(default_pool)
    assert 0 < counting_pool.max_memory() < 100_000
