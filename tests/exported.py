"""Rollouts whose texts, rewards and ends are known, for the tests of what leaves a store.

made = make(store)          # prompts of the real stage, rollouts/1, rewards/1
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from quiver.stages.core.store import Store, Version
from tests import episodes
from tests.tiny import EOS, make_policy, tokenizer
from tests.writing import run_here

ANSWERS = {
    "q0": [("12", 1.0, "stop"), ("twelve", 0.5, "stop"), ("no", 0.0, "stop"), ("?", None, "stop")],
    "q1": [("7", 1.0, "stop"), ("seven", 1.0, "stop"), ("7.", 1.0, "stop"), ("7!", 1.0, "stop")],
    "q2": [("3", 0.2, "stop"), ("four", 0.0, "stop"), ("it is 3", 1.0, "length"), ("", None, "abort")],
}  # fmt: skip
"""Text, reward and finish reason of each answer, by its prompt."""
SYSTEM = "Be short."


class Made(NamedTuple):
    """The versions."""

    policy: Version
    prompts: Version
    rollouts: Version
    rewards: Version


def question(group: str) -> str:
    return f'What is "{group}"?\nSay 7.'


def make_prompts(store: Store, policy: Version, folder: Path, **config: Any) -> Version:
    """The questions as the prompt stage renders them, with their answers and a system message."""
    rows = [
        {"id": group, "question": question(group), "answer": n} for n, group in enumerate(ANSWERS)
    ]
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"prompt": "question", "group_id": "id", "system": SYSTEM, **config}
    return store.open(run_here("prompt", {"source": str(path), **config}, store, policy=policy.ref))


def make(store: Store, folder: Path, **config: Any) -> Made:
    """The rollouts of `ANSWERS`, with rewards/1."""
    policy = make_policy(store)
    prompts = make_prompts(store, policy, folder, **config)
    prompt_ids = dict(
        zip(
            *(prompts.table()[name].to_pylist() for name in ("group_id", "prompt_ids")), strict=True
        )
    )
    rows = []
    rewards = {}
    for group, answers in ANSWERS.items():
        for index, (text, reward, finish_reason) in enumerate(answers):
            ids = tokenizer().encode(text, add_special_tokens=False) + [EOS] * (
                finish_reason == "stop"
            )
            row = episodes.row(f"{group}-{index}", [episodes.turn(len(ids))], ids)
            row |= {
                "prompt_ids": prompt_ids[group],
                "completion_text": text,
                "finish_reason": finish_reason,
            }
            rewards[row["rollout_id"]] = reward
            del row["turns"], row["end_reason"]
            rows.append(row)
    rollouts = episodes.write(store, policy, rows, prompts=prompts, max_tokens=8)

    def reward_of(row: dict[str, Any]) -> list[float] | None:
        reward = rewards[row["rollout_id"]]
        return None if reward is None else [reward]

    return Made(
        policy,
        prompts,
        rollouts,
        episodes.write_rewards(store, rollouts, reward_of, of_turns=False),
    )
