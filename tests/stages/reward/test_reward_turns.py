"""Rollouts with turns are scored: by what the environment gave, by functions that ask for what was
said, again and by hand; what each turn earned adds up to the reward."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from quiver.schemas import rewards as kind
from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.loading import load_model
from quiver.stages.evaluate.stage import Config as EvaluateConfig
from quiver.stages.logprobs.stage import Config as LogprobsConfig
from quiver.stages.reward.override import Config as OverrideConfig
from quiver.stages.reward.stage import Config
from quiver.stages.reward.turns import messages_of, read, with_rest
from tests import episodes
from tests.episodes import turn
from tests.stages.optimize import world
from tests.writing import run_here

score = partial(run_here, "reward")

MINE = """
import json

def talk(transcript, turns, end_reason, **_):
    with open("seen.jsonl", "a") as file:
        file.write(json.dumps([transcript, turns, end_reason]) + "\\n")
    return [float(len(messages)) for messages in transcript]

def short(completions):
    return [None if text == "none" else float(len(text)) for text in completions]

def flaky(completions):
    if any(text == "second" for text in completions):
        raise ValueError("no")
    return [1.0] * len(completions)
"""
CALL = json.dumps([{"name": "add", "arguments": {"a": 1}}])


def row(name: str, turns: list[dict], text: str, reason: str = "environment") -> dict:
    count = sum(part["length"] for part in turns)
    return {
        "rollout_id": name,
        "group_id": "g-0",
        "sample_index": int(name[-1]),
        "prompt_ids": [1, 5],
        "completion_ids": [7] * count,
        "old_logprobs": [-0.5] * count,
        "finish_reason": "stop",
        "stop_reason": None,
        "completion_text": text,
        "temperature": 1.0,
        "seed": 0,
        "turns": turns,
        "end_reason": reason,
    }


ROWS = [
    row(
        "e-0",
        [
            turn(2, [9, 9], text="first", observation="too low", reward=0.25, info='{"n": 1}'),
            turn(1, [9], text="call", tool_calls=CALL, observation="3"),
            turn(1, text="last", reward=1.0),
        ],
        "last",
    ),
    row("e-1", [turn(1, [9], text="x", observation="no"), turn(1, text="second")], "second"),
    row("e-2", [turn(1, text="y", reward=0.5)], "none", "environment_error"),
]


@pytest.fixture
def rollouts(store, policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return episodes.write(store, policy, ROWS, prompts=world.write_prompts(store, ROWS))


def config(*functions, **options) -> Config:
    uses = [{"use": use} if isinstance(use, str) else use for use in functions]
    return Config(functions=uses, workers=1, **options)


def test_what_the_environment_gave_is_a_part(store, rollouts):
    weighed = {"use": "environment", "weight": 2.0}
    ref = score(config(weighed, "mine.py:short"), store, rollouts=rollouts.ref)
    version = store.open(ref)
    rows = version.table().to_pylist()
    assert version.manifest.kind_schema == "rewards/2"
    assert [row["parts"] for row in rows] == [
        {"environment": 1.25, "short": 4.0},
        {"environment": None, "short": 6.0},
        {"environment": None, "short": None},
    ]
    assert [row["reward"] for row in rows] == [6.5, 6.0, None]
    # each turn's own, weighed; what is of no turn stands at the last
    assert [row["turn_rewards"] for row in rows] == [[0.5, None, 6.0], [None, 6.0], None]


def test_a_clip_and_a_penalty_are_the_last_turns(store, rollouts):
    penalty = {"max_tokens": 4, "cache": 4}
    clipped = config("environment", reward_clip=[0.0, 1.0], overlong=penalty)
    rows = store.open(score(clipped, store, rollouts=rollouts.ref)).table().to_pylist()
    assert rows[0]["reward"] == 0.0  # 1.25 clipped to 1, four tokens cost 1
    assert rows[0]["turn_rewards"] == [0.25, None, -0.25]


def test_without_the_environment_rewards_are_of_the_whole(store, rollouts):
    version = store.open(score(config("mine.py:short"), store, rollouts=rollouts.ref))
    assert version.manifest.kind_schema == "rewards/1"
    assert "turn_rewards" not in version.table().column_names


def test_a_function_may_ask_for_what_was_said(store, rollouts, tmp_path):
    rows = store.open(score(config("mine.py:talk"), store, rollouts=rollouts.ref)).table()
    assert rows["reward"].to_pylist() == [6.0, 4.0, None]
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    transcripts, turns, reasons = (
        [cell for call in calls for cell in call[column]] for column in range(3)
    )
    first = next(messages for messages in transcripts if len(messages) == 6)
    assert first[1:] == [
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "too low"},
        {"role": "assistant", "content": "call", "tool_calls": json.loads(CALL)},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "last"},
    ]
    assert first[0] == {"role": "user", "content": "g-0"}
    parts = next(row for row in turns if len(row) == 3)
    assert parts[0]["info"] == {"n": 1} and parts[1]["tool_calls"] == json.loads(CALL)
    assert not any("ids" in name for name in parts[0])
    assert set(reasons) == {"environment", "environment_error"}


def test_the_refusal_of_a_turn_that_could_not_be_read_is_a_tools():
    """As the policy reads it."""
    refused = turn(1, text="<tool_call>", parse_error="no JSON", observation="Error: no JSON")
    assert messages_of([refused]) == [
        {"role": "assistant", "content": "<tool_call>"},
        {"role": "tool", "content": "Error: no JSON"},
    ]


def test_what_is_nested_too_deeply_to_be_read_stays_text():
    text = "[" * 100_000 + "]" * 100_000
    assert read(text) == text and read('{"n": [1]}') == {"n": [1]} and read(None) is None


def test_nothing_is_known_of_an_episode_that_failed_whatever_scores_it(store, rollouts):
    """Neither its reward nor a part of it, by which an evaluation may go."""
    everyone = config("environment", "mine.py:talk", overlong={"max_tokens": 4, "cache": 4})
    (*_, failed) = store.open(score(everyone, store, rollouts=rollouts.ref)).table().to_pylist()
    assert (failed["reward"], failed["turn_rewards"]) == (None, None)
    assert (failed["parts"]["environment"], failed["parts"]["talk"]) == (None, None)


def test_one_turn_rollouts_offer_no_turns(store, policy, rollouts):
    single = [{k: v for k, v in row.items() if k not in ("turns", "end_reason")} for row in ROWS]
    version = episodes.write(
        store, policy, single, "single", world.write_prompts(store, single, "single")
    )
    for use in ("environment", "mine.py:talk"):
        with pytest.raises(
            ConfigError, match=r"needs (end_reason|transcript|turns), which episodes alone have"
        ):
            score(config(use), store, rollouts=version.ref)


def test_a_retry_keeps_what_turns_earned(store, rollouts, tmp_path):
    flaky = config("environment", "mine.py:flaky", max_invalid=0.5)
    first = store.open(score(flaky, store, rollouts=rollouts.ref))
    assert first.table()["reward"].to_pylist() == [2.25, None, None]
    (tmp_path / "mine.py").write_text(MINE.replace('text == "second"', "False"))
    again = store.open(score(flaky, store, rollouts=rollouts.ref, retry=first.ref))
    rows = again.table().to_pylist()
    assert [row["reward"] for row in rows] == [2.25, 1.0, None]
    assert [row["turn_rewards"] for row in rows] == [[0.25, None, 2.0], [None, 1.0], None]
    assert again.manifest.kind_schema == "rewards/2"


def test_a_person_corrects_the_last_turn(store, rollouts):
    first = store.open(score(config("environment"), store, rollouts=rollouts.ref))
    corrected = OverrideConfig(author="ada", reason="it was right", overrides={"e-0": 3.0})
    rows = store.open(run_here("override", corrected, store, rewards=first.ref)).table()
    assert rows["reward"].to_pylist() == [3.0, None, None]
    assert rows["turn_rewards"].to_pylist() == [[0.25, None, 2.75], None, None]
    kind.check(rows)


def test_what_is_of_no_turn_is_the_last_ones():
    assert with_rest([1.0], 0.5) == [0.5]
    assert with_rest([None, None], 0.5) == [None, 0.5]


def test_episodes_are_scored_and_learned_from(store, policy):
    """Saved turns through reward, logprobs and optimize, with what each turn earned."""
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(3), 4)
    for place, row in enumerate(rows):
        for number, part in enumerate(row["turns"]):
            part["reward"] = float((place + number) % 3)
    rollouts = episodes.write(store, policy, rows, prompts=world.write_prompts(store, rows))
    refs = {"rollouts": rollouts.ref}
    refs["rewards"] = score(config("environment"), store, **refs)
    refs["prox_logprobs"] = run_here(
        "logprobs",
        LogprobsConfig(role="prox"),
        store,
        rollouts=rollouts.ref,
        policy=policy.ref,
    )
    done = store.open(
        run_here("optimize", world.config(credit="turn"), store, policy=policy.ref, **refs)
    )
    assert done.manifest.metrics["audit"]["prox"]["mean_gap"] < 1e-5
    assert done.manifest.metrics["kept"] == len(rows)
    held = store.open(
        run_here(
            "evaluate",
            EvaluateConfig(),
            store,
            rollouts=rollouts.ref,
            rewards=refs["rewards"],
        )
    )
    assert held.manifest.metrics["n"] == 3
    tokens = held.table()["completion_tokens"].to_pylist()
    assert sorted(tokens) == sorted(len(row["completion_ids"]) for row in rows)
    assert rollouts.to_datasets()[0]["turns"] == rows[0]["turns"]
