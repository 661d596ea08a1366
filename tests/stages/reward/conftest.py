"""Rollouts to score, written through the store as the generate stage writes them, and the reward
stage on them."""

import pyarrow as pa
import pytest

from quiver.schemas import fields, prompts, rollouts
from quiver.stages.core.config import Config
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.reward.stage import Config as RewardConfig
from tests.writing import begin, run_here


@pytest.fixture
def write(store):
    """Write a table as the next version of a kind, in shards."""

    def put(kind, table, inputs=None):
        with begin(
            store,
            "arith",
            kind,
            stage="test",
            stage_version=1,
            config=Config(),
            inputs=inputs or {},
            force=True,
        ) as work:
            for index, start in enumerate(range(0, max(1, table.num_rows), ROWS_PER_SHARD)):
                work.write(index, table.slice(start, ROWS_PER_SHARD))
            return work.commit()

    return put


@pytest.fixture
def sample(write):
    """Make rollouts: completions by prompt, with the prompts' user columns; returns the version of
    the rollouts."""

    def make(completions: list[list[str]], columns: dict[str, list], messages=True, finish="stop"):
        groups = [f"sum-{number}" for number in range(len(completions))]
        struct = pa.StructArray.from_arrays(
            [pa.array(values) for values in columns.values()], list(columns)
        )
        chat = [
            [{"role": "user", "content": f"ask {group}"}] if messages else None for group in groups
        ]
        schema = fields.with_struct(prompts.SCHEMA, columns=struct.type)
        texts = [f"text of {group}" for group in groups]
        arrays = [
            groups,
            pa.array(chat, prompts.MESSAGES),
            texts,
            pa.array([[1, 5]] * len(groups), schema.field(3).type),
            struct,
        ]
        asked = write("prompts", pa.table(arrays, schema=schema))
        rows = [
            (group, at, text)
            for group, texts in zip(groups, completions, strict=True)
            for at, text in enumerate(texts)
        ]
        rows = rows[::-1]  # never in the order of the prompts
        ids = [[7] * len(text.split()) for *_, text in rows]
        table = pa.table(
            {
                "rollout_id": [f"0-{group}-{at}" for group, at, _ in rows],
                "group_id": [group for group, *_ in rows],
                "sample_index": pa.array([at for _, at, _ in rows], pa.int32()),
                "prompt_ids": pa.array(
                    [[1, 5]] * len(rows), rollouts.SCHEMA.field("prompt_ids").type
                ),
                "completion_ids": pa.array(ids, rollouts.SCHEMA.field("completion_ids").type),
                "old_logprobs": pa.array(
                    [[-0.5] * len(i) for i in ids], rollouts.SCHEMA.field("old_logprobs").type
                ),
                "finish_reason": [finish] * len(rows),
                "stop_reason": pa.nulls(len(rows), pa.string()),
                "completion_text": [text for *_, text in rows],
                "temperature": pa.array([1.0] * len(rows), pa.float32()),
                "seed": pa.array([0] * len(rows), pa.int64()),
            },
            schema=rollouts.SCHEMA,
        )
        return write("rollouts", table, {"prompts": asked})

    return make


@pytest.fixture
def score(store):
    """Score rollouts by functions, named or as sections; returns the version of the rewards."""

    def run(rollouts, *functions, retry=None, into=None, force=False, **options):
        sections = [{"use": use} if isinstance(use, str) else use for use in functions]
        config = RewardConfig(functions=sections, **options)
        refs = {"rollouts": rollouts.ref, **({"retry": retry.ref} if retry else {})}
        return store.open(run_here("reward", config, store, into=into, force=force, **refs))

    return run


@pytest.fixture
def column():
    """One field of the rewards, by rollout: `0-sum-3-1` of `sample` is 3-1."""

    def read(version, name="reward"):
        rows = version.table().to_pylist()
        return {row["rollout_id"].removeprefix("0-sum-"): row[name] for row in rows}

    return read
