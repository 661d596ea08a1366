"""Rollouts and rewards for the optimizer's tests: sampled from the policy itself with plain
transformers and torch, no engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from quiver.schemas import fields
from quiver.schemas import logprobs as logprobs_kind
from quiver.schemas import prompts as prompts_kind
from quiver.schemas import rewards as rewards_kind
from quiver.schemas import rollouts as rollouts_kind
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, Version
from quiver.stages.model.checkpoints import PolicyConfig, model_entry
from quiver.stages.model.loading import load_model
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize import stage as optimize
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.trainer import Trainer
from tests.stages.generate.making import random_prompts
from tests.tiny import EOS, make_folder
from tests.writing import begin, run_here

import_policy = partial(run_here, "policy")


def import_changed(
    store: Store, folder: Path, run: str, *, config: dict | None = None, nudge: float = 0.0
) -> Version:
    """`run/policy@0`: the tiny policy with other values in its config.json, or with its first
    weight moved by `nudge`."""
    edit_config(make_folder(folder), **(config or {}))
    with edited_weights(folder) as weights:
        next(iter(weights.values())).view(-1)[0] += nudge
    return imported(store, folder, run)


def imported(store: Store, folder: Path, run: str) -> Version:
    """`run/policy@0`: the model of a folder."""
    return store.open(import_policy(PolicyConfig(model=str(folder)), store, into=run))


def edit_config(folder: Path, **values) -> None:
    """Put other values into its config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@contextmanager
def edited_weights(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """A model's weights by name, to be changed in place; they are saved again."""
    weights = load_file(folder / "model.safetensors")
    yield weights
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def make_bfloat16(folder: Path) -> None:
    """Round a model's weights to bfloat16."""
    with edited_weights(folder) as weights:
        weights |= {name: weight.bfloat16() for name, weight in weights.items()}


def config(**values) -> optimize.Config:
    """For a CPU, with a rate at which a tiny model moves."""
    return optimize.Config(**{"device": "cpu", "learning_rate": 1e-3, **values})


def trained(
    store: Store,
    policy: Version,
    made: tuple[Version, Version],
    chosen: optimize.Config | None = None,
    **refs,
) -> Version:
    """The policy that the stage makes of `made`, rollouts and rewards; `refs` are put over
    these."""
    named = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref, **refs}
    return store.open(run_here("optimize", chosen or config(), store, **named))


@contextmanager
def dies_after(steps: int) -> Iterator[None]:
    """A training inside dies in the place of its next step, and must."""
    step = Trainer._train_minibatch

    def dies(self, *arguments):
        if len(self.updates) == steps:
            raise KeyboardInterrupt
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "_train_minibatch", dies)
        yield


def inputs_of(policy: Version, made: tuple[Version, Version]) -> dict[str, Version]:
    """The versions of a training by role."""
    return {"policy": policy, "rollouts": made[0], "rewards": made[1]}


def weights(version: Version, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """What is saved of a policy in one file, by name."""
    return load_file(version.files.folder / name)


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, under the same names."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def updates(store: Store, done: Version) -> list[dict]:
    """The rows of updates/1 of a training."""
    return store.open(done.manifest.metrics["updates"]).table().to_pylist()


def advantages(store: Store, done: Version) -> list[dict]:
    """The rows of advantages/1 of a training."""
    return store.open(done.manifest.metrics["advantages"]).table().to_pylist()


def gains(store: Store, done: Version) -> list:
    """The advantage of each rollout of a training, or those of its tokens."""
    return [row["advantage"] for row in advantages(store, done)]


def sampled_logprobs(rollouts: Version, less: float = 0.0) -> list[list[float]]:
    """What rollouts were sampled with, each number lowered by `less`."""
    rows = rollouts.table()["old_logprobs"].to_pylist()
    return [[old - less for old in row] for row in rows]


def scored(
    store: Store, policy: Version, rows: list[dict], score=None, run: str = "tiny", **about
) -> tuple[Version, Version]:
    """The rows as rollouts, and their rewards: by default their share of even ids."""
    rollouts = write_rollouts(store, policy, rows, run, **about)
    return rollouts, write_rewards(store, rollouts, score or even_share, run)


_sampled: dict[tuple, list[dict]] = {}


def rows_of(policy: Version, groups: int, each: int, **options) -> list[dict]:
    """Rows that the policy samples: `each` of `groups` random prompts; of equal weights they are
    sampled once a process."""
    key = model_entry("policy", policy).weights, groups, each, *sorted(options.items())
    if key not in _sampled:
        model = load_model(policy, dtype=torch.float32)
        _sampled[key] = sample(model, prompts(groups), each, **options)
    return deepcopy(_sampled[key])


def by_engine(
    store,
    policy,
    *,
    engine="transformers",
    groups=4,
    each=4,
    seed=0,
    temperature=0.8,
    tokens=9,
    low=2,
    high=14,
) -> tuple[Version, Version]:
    """Rollouts of a shipped engine, and their rewards."""
    config = {
        "engine": engine,
        "device": "cpu",
        "samples_per_prompt": each,
        "dtype": "float32",
        "seed": seed,
        "sampling": {"temperature": temperature, "max_tokens": tokens},
    }
    run = policy.ref.run
    asked = random_prompts(store, groups, low=low, high=high, run=run)
    refs = {"prompts": asked.ref, "policy": policy.ref}
    rollouts = store.open(run_here("generate", config, store, **refs))
    return rollouts, write_rewards(store, rollouts, even_share, run)


def trainer(
    store: Store,
    inputs: dict[str, Version],
    config: optimize.Config,
    model: torch.nn.Module | None = None,
    **options,
) -> Trainer:
    """The loop before its first step. `inputs`: versions by role, as the stage's plan has them."""
    resolved = config.resolved()
    algorithm = resolved.chosen_algorithm()
    batch = joining.load(resolved, algorithm, store, inputs).batch
    model = model or load_model(inputs["policy"], dtype=torch.float32)
    return Trainer(resolved, model, batch, algorithm, make_accelerator(resolved), **options)


def step(trainer: Trainer) -> dict:
    """The numbers of a step over all rollouts of the batch; its gradient is in the parameters."""
    everyone = list(range(len(trainer.batch.groups)))
    return trainer.accumulate(everyone, everyone)


class Settings(Config):
    """What the stand-in for generation writes into its manifest."""

    sampling: dict[str, Any] = Field(default_factory=dict)
    """top_p, top_k, …"""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine's."""
    name: str = ""
    """Tells one stand-in from another."""
    role: str | None = None
    """ref or prox, of logprobs."""


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 9) -> list[list[int]]:
    """Random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def sample(
    model,
    asked: Sequence[Sequence[int]],
    each: int,
    longest: int = 8,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
) -> list[dict]:
    """`each` completions of every prompt, token by token, with their logprobs at `temperature`;
    with `top_k` both are of that many likeliest tokens alone, renormalised."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, prompt in enumerate(asked):
        ids = torch.tensor([list(prompt)] * each)
        scores = []
        for _ in range(longest):
            table = (
                model(input_ids=ids, use_cache=False).logits[:, -1].float() / temperature
            ).log_softmax(-1)
            if top_k is not None:
                least = table.topk(top_k).values[:, -1:]
                table = table.masked_fill(table < least, -torch.inf).log_softmax(-1)
            chosen = torch.multinomial(table.exp(), 1, generator=generator)
            scores.append(table.gather(1, chosen))
            ids = torch.cat([ids, chosen], 1)
        for index in range(each):
            completion = ids[index, len(prompt) :].tolist()
            end = completion.index(EOS) + 1 if EOS in completion else longest
            rows.append(
                {
                    "rollout_id": f"r-{number:03d}-{index}",
                    "group_id": f"g-{number:03d}",
                    "sample_index": index,
                    "prompt_ids": list(prompt),
                    "completion_ids": completion[:end],
                    "old_logprobs": [min(float(score[index]), 0.0) for score in scores[:end]],
                    "finish_reason": "stop" if EOS in completion else "length",
                    "stop_reason": None,
                    "completion_text": "",
                    "temperature": temperature,
                    "seed": 0,
                }
            )
    return rows


def own_pass(model, row: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """By the model's own pass, with gradient: logprobs [T, V] of the whole vocabulary at each token
    of a row's completion, at its temperature; and the T + 1 hidden states before its tokens and
    after the last."""
    prompt, ids = row["prompt_ids"], row["completion_ids"]
    if model.config.is_encoder_decoder:
        start = model.config.decoder_start_token_id
        inputs = {"input_ids": prompt, "decoder_input_ids": [start, *ids]}
        first, states = 0, "decoder_hidden_states"
    else:
        inputs = {"input_ids": prompt + ids}
        first, states = len(prompt) - 1, "hidden_states"
    inputs = {name: torch.tensor([part]) for name, part in inputs.items()}
    out = model(**inputs, use_cache=False, output_hidden_states=True)
    table = (out.logits[0, first:-1] / row["temperature"]).log_softmax(-1)
    return table, out[states][-1][0, first:]


def of_ids(table: torch.Tensor, row: dict) -> torch.Tensor:
    """[T] of a row's own ids, from [T, V]."""
    return table.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]


def own_logprobs(model, row: dict) -> torch.Tensor:
    """[T] logprobs of a row's completion by the model's own pass; with gradient."""
    return of_ids(own_pass(model, row)[0], row)


def write(store: Store, run: str, kind: str, stage: str, tables: list[pa.Table], **about):
    """A version of these shards, as `stage` would write it: what the manifest says is in `about`."""
    committed = {name: about.pop(name) for name in ("metrics", "status") if name in about}
    about = {"config": Settings(), "inputs": {}, "stage_version": 1, "force": True, **about}
    with begin(store, run, kind, stage=stage, **about) as work:
        for index, table in enumerate(tables):
            work.write(index, table)
        return work.commit(**committed)


def write_rollouts(
    store: Store,
    policy: Version,
    rows: list[dict],
    run: str = "tiny",
    prompts: Version | None = None,
    metrics: dict | None = None,
    **settings,
) -> Version:
    """rollouts/1 that say they were sampled by `policy`, of `prompts`."""
    table = pa.Table.from_pylist(rows, schema=rollouts_kind.SCHEMA)
    half = max(1, len(table) // 2)  # several shards: columns come in chunks
    return write(
        store,
        run,
        "rollouts",
        "generate",
        [table.slice(start, half) for start in range(0, max(1, len(table)), half)],
        config=Settings(**settings),
        inputs={"prompts": prompts} if prompts else {},
        models=(model_entry("policy", policy),),
        metrics=metrics or {},
        status=dict(Counter(row["finish_reason"] for row in rows)),
    )


def write_prompts(store: Store, rows: list[dict], run: str = "tiny") -> Version:
    """prompts/1 of the rollouts `rows`, without a column of a user's but their number."""
    asked = {row["group_id"]: row["prompt_ids"] for row in rows}
    schema = fields.with_struct(prompts_kind.SCHEMA, columns=pa.struct({"n": pa.int64()}))
    lines = [
        {"group_id": group, "prompt_text": group, "prompt_ids": ids, "columns": {"n": number}}
        for number, (group, ids) in enumerate(asked.items())
    ]
    return write(store, run, "prompts", "prompt", [pa.Table.from_pylist(lines, schema=schema)])


def write_rewards(
    store: Store,
    rollouts: Version,
    score: Callable[[dict], float | None] | list[dict],
    run: str = "tiny",
    inputs: dict[str, Version] | None = None,
    names: Sequence[str] = ("f",),
) -> Version:
    """rewards/1 by a function of the rollout's row, or as given, with parts of these `names`.
    `inputs`: what its manifest says instead of `rollouts`."""
    rows = score
    if callable(score):
        rows = [
            {
                "rollout_id": row["rollout_id"],
                "group_id": row["group_id"],
                "reward": score(row),
                "parts": {"f": score(row)},
            }
            for row in rollouts.table().to_pylist()
        ]
    none = dict.fromkeys(names)
    rows = [{"parts": none, **row, "errors": none} for row in rows]
    table = pa.Table.from_pylist(rows, schema=rewards_kind.schema_for(list(names)))
    inputs = {"rollouts": rollouts} if inputs is None else inputs
    return write(store, run, "rewards", "reward", [table], inputs=inputs)


def write_logprobs(
    store: Store,
    rollouts: Version,
    values: list[list[float]],
    role: str = "ref",
    policy: Version | None = None,
) -> Version:
    """logprobs/1 for the rows of `rollouts`, in reverse order; they say that they are
    `policy`'s."""
    ids = rollouts.table()["rollout_id"].to_pylist()
    rows = [{"rollout_id": id, "logprobs": row} for id, row in zip(ids, values, strict=True)]
    return write(
        store,
        "tiny",
        "logprobs",
        "logprobs",
        [pa.Table.from_pylist(rows[::-1], schema=logprobs_kind.SCHEMA)],
        config=Settings(role=role),
        inputs={"rollouts": rollouts},
        models=(model_entry(role, policy),) if policy else (),
    )


def make(
    store: Store,
    policy: Version,
    score: Callable[[dict], float | None],
    groups: int = 4,
    each: int = 4,
    run: str = "tiny",
):
    """(rollouts, rewards) of `groups` random prompts, `each` completions."""
    rollouts = write_rollouts(store, policy, rows_of(policy, groups, each), run)
    return rollouts, write_rewards(store, rollouts, score, run)


def even_share(row: dict) -> float:
    """A reward that differs within groups: the share of even ids."""
    return sum(token % 2 == 0 for token in row["completion_ids"]) / len(row["completion_ids"])


def start_ranks(
    python: str, module: str, folder: Path, size: int, *arguments: str
) -> tuple[list[subprocess.Popen], list[Path]]:
    """`size` processes that run a module as ranks on this host, and the files in `folder` that they
    log to. Nobody watches over them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    ranks, logs = [], [folder / f"rank-{rank}-of-{size}.log" for rank in range(size)]
    for rank, log in enumerate(logs):
        with log.open("w") as stderr:
            ranks.append(
                subprocess.Popen(
                    [python, "-m", module, *arguments],
                    cwd=Path(__file__).parents[3],
                    env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
    return ranks, logs
