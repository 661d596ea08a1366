"""Episodes of several turns that tests make themselves: rollouts/2 sampled from a tiny model with
plain transformers, observations of random ids, and rewards/2 of them.

    rows = sample(load_model(policy, dtype=torch.float32), prompts(4), 3)
    rollouts = write(store, policy, rows)
    rewards = write_rewards(store, rollouts, turn_rewards=share_of_even_ids)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import torch
from pydantic import Field

from quiver.schemas import rewards as rewards_kind
from quiver.schemas import rollouts as rollouts_kind
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, Version
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.model.loading import load_model
from tests.tiny import EOS
from tests.writing import begin


class Settings(Config):
    """What the stand-in for a stage writes into its manifest."""

    sampling: dict[str, Any] = Field(default_factory=dict)
    """max_tokens, …"""


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of 3 to 8 ids."""
    generator = torch.Generator().manual_seed(seed)
    return [_random_ids(generator, 3, 9) for _ in range(count)]


def turn(length: int, observation_ids: Sequence[int] = (), **changed) -> dict[str, Any]:
    """One turn of a row of rollouts/2."""
    return {
        "length": length,
        "text": "",
        "observation_ids": list(observation_ids),
        "restart_ids": None,
        "finish_reason": "stop",
        "tool_calls": None,
        "parse_error": None,
        "observation": "",
        "reward": None,
        "info": None,
        "seconds": 0.0,
        **changed,
    }


def row(
    name: str, turns: Sequence[dict[str, Any]], ids: Sequence[int] | None = None, **changed
) -> dict[str, Any]:
    """One row of rollouts/2 of these turns, of group `NAME` where it is called `NAME-INDEX`; without
    `ids` it sampled 10, 11, …, each with logprob -0.5."""
    group, _, index = name.rpartition("-")
    length = sum(part["length"] for part in turns)
    return {
        "rollout_id": name,
        "group_id": group,
        "sample_index": int(index),
        "prompt_ids": [5, 6],
        "completion_ids": list(range(10, 10 + length) if ids is None else ids),
        "old_logprobs": [-0.5] * length,
        "finish_reason": turns[-1]["finish_reason"],
        "stop_reason": None,
        "completion_text": turns[-1]["text"],
        "temperature": 1.0,
        "seed": 0,
        "turns": list(turns),
        "end_reason": "answered",
        **changed,
    }


@torch.no_grad()
def sample(
    model,
    asked: Sequence[Sequence[int]],
    each: int,
    *,
    most_turns: int = 3,
    longest: int = 5,
    temperature: float = 1.0,
    restarts: bool = True,
    seed: int = 0,
    vocabulary: int = 300,
) -> list[dict[str, Any]]:
    """`each` episodes of every prompt: 1 to `most_turns` turns of up to `longest` ids, an
    observation of 1 to 4 ids between them; with `restarts` some turns begin with a history of their
    own instead. What the model did not sample is ids below `vocabulary`."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, prompt in enumerate(asked):
        for index in range(each):
            num_turns = 1 + (number + index) % most_turns
            read = list(prompt)
            ids: list[int] = []
            logprobs: list[float] = []
            turns: list[dict[str, Any]] = []
            for count in range(num_turns):
                history = None
                if restarts and count and (number + index + count) % 3 == 0:
                    history = _random_ids(generator, 2, 6, vocabulary)
                    read = list(history)
                elif count:
                    turns[-1]["observation_ids"] = _random_ids(generator, 1, 5, vocabulary)
                    turns[-1]["observation"] = f"observation {count}"
                    read += turns[-1]["observation_ids"]
                sampled = 0
                while sampled < longest and not (sampled and read[-1] == EOS):
                    logits = model(input_ids=torch.tensor([read]), use_cache=False).logits[0, -1]
                    table = (logits.float() / temperature).log_softmax(-1)
                    read.append(int(torch.multinomial(table.exp(), 1, generator=generator)))
                    ids.append(read[-1])
                    logprobs.append(min(float(table[read[-1]]), 0.0))
                    sampled += 1
                turns.append(
                    turn(
                        sampled,
                        text=f"text {count}",
                        restart_ids=history,
                        finish_reason="stop" if read[-1] == EOS else "length",
                    )
                )
            rows.append(
                {
                    "rollout_id": f"e-{number:03d}-{index}",
                    "group_id": f"g-{number:03d}",
                    "sample_index": index,
                    "prompt_ids": list(prompt),
                    "completion_ids": ids,
                    "old_logprobs": logprobs,
                    "finish_reason": turns[-1]["finish_reason"],
                    "stop_reason": None,
                    "completion_text": f"answer {index}",
                    "temperature": temperature,
                    "seed": 0,
                    "turns": turns,
                    "end_reason": "answered",
                }
            )
    return rows


def sequences_of(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """What the model reads of a row, written out plainly: of each of its sequences the ids, and the
    places in them of those that were sampled."""
    sequences = [(list(row["prompt_ids"]), [])]
    sampled = iter(row["completion_ids"])
    for part in row["turns"]:
        if part["restart_ids"] is not None:
            sequences.append((list(part["restart_ids"]), []))
        ids, places = sequences[-1]
        for _ in range(part["length"]):
            places.append(len(ids))
            ids.append(next(sampled))
        ids += part["observation_ids"]
    return sequences


def own_logprobs(model, row: dict[str, Any]) -> torch.Tensor:
    """[T] logprobs of the sampled ids by transformers' own pass over each whole sequence; with
    gradient."""
    logprobs = []
    for ids, places in sequences_of(row):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        table = (logits.float() / row["temperature"]).log_softmax(-1)
        logprobs += [table[place - 1, ids[place]] for place in places]
    return torch.stack(logprobs)


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    """rollouts/2 of `rows`; rollouts/1 where they have no turns."""
    has_turns = bool(rows) and "turns" in rows[0]
    schema = rollouts_kind.OF_TURNS if has_turns else rollouts_kind.SCHEMA
    return pa.Table.from_pylist(rows, schema=schema)


def write(
    store: Store,
    policy: Version,
    rows: list[dict[str, Any]],
    run: str = "tiny",
    prompts: Version | None = None,
    **sampling,
) -> Version:
    """The rows as a version that says it was sampled by `policy`, in two shards."""
    table = table_of(rows)
    about = {
        "stage": "generate",
        "stage_version": 1,
        "config": Settings(sampling=sampling),
        "inputs": {"prompts": prompts} if prompts else {},
        "models": (model_entry("policy", policy),),
    }
    with begin(store, run, "rollouts", **about, force=True) as work:
        half = max(1, len(table) // 2)
        for index, start in enumerate(range(0, max(1, len(table)), half)):
            work.write(index, table.slice(start, half))
        return work.commit(status=dict(Counter(row["finish_reason"] for row in rows)))


def even_ids(row: dict[str, Any]) -> list[float]:
    """A reward for each turn that differs within groups: its share of even ids."""
    rewards = []
    start = 0
    for part in row["turns"]:
        ids = row["completion_ids"][start : start + part["length"]]
        rewards.append(sum(id % 2 == 0 for id in ids) / max(len(ids), 1))
        start += part["length"]
    return rewards


def write_rewards(
    store: Store,
    rollouts: Version,
    turn_rewards: Callable[[dict[str, Any]], list[float | None] | None] = even_ids,
    run: str = "tiny",
    *,
    of_turns: bool = True,
) -> Version:
    """rewards/2 by the rewards of a row's turns, whose sum is its reward; None: not scored.
    Without `of_turns` rewards/1, of the same sums."""
    rows = []
    for row in rollouts.table().to_pylist():
        earned = turn_rewards(row)
        total = None if earned is None else sum(reward or 0.0 for reward in earned)
        reward = {
            "rollout_id": row["rollout_id"],
            "group_id": row["group_id"],
            "reward": total,
            "parts": {"f": total},
            "errors": {"f": None},
        }
        rows.append({**reward, "turn_rewards": earned} if of_turns else reward)
    schema = rewards_kind.schema_for(["f"], of_turns=of_turns)
    about = {
        "stage": "reward",
        "stage_version": 1,
        "config": Settings(),
        "inputs": {"rollouts": rollouts},
    }
    with begin(store, run, "rewards", **about, force=True) as work:
        work.write(0, pa.Table.from_pylist(rows, schema=schema))
        return work.commit()


def make(
    store: Store, policy: Version, groups: int = 4, each: int = 4, run: str = "tiny", **options
) -> tuple[Version, Version]:
    """(rollouts/2, rewards/2) of `groups` random prompts, `each` episodes; `options` as of
    `sample`."""
    model = load_model(policy, dtype=torch.float32)
    rollouts = write(store, policy, sample(model, prompts(groups), each, **options), run)
    return rollouts, write_rewards(store, rollouts, run=run)


def _random_ids(
    generator: torch.Generator, low: int, high: int, vocabulary: int = 300
) -> list[int]:
    length = int(torch.randint(low, high, (), generator=generator))
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()
