"""Rollouts with turns are scored: by what the environment gave, by functions that ask for what was
said, again and by hand; what each turn earned adds up to the reward."""

from __future__ import annotations

import json

import pytest

from quiver.schemas import rewards as kind
from quiver.schemas.errors import ConfigError
from quiver.stages.reward.override import Config as OverrideConfig
from quiver.stages.reward.turns import messages_of, read, with_rest
from tests import episodes
from tests.episodes import turn
from tests.stages.optimize import world
from tests.writing import run_here

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


def cells(version, *names: str) -> list:
    table = version.table()
    return [table[name].to_pylist() for name in names]


def test_what_the_environment_gave_is_a_part(score, rollouts):
    """Each turn's own, weighed; what is of no turn stands at the last. Nothing is known of an
    episode that failed, whatever scores it."""
    version = score(rollouts, {"use": "environment", "weight": 2.0}, "mine.py:short")
    assert version.manifest.kind_schema == "rewards/2"
    assert cells(version, "parts", "reward", "turn_rewards") == [
        [
            {"environment": 1.25, "short": 4.0},
            {"environment": None, "short": 6.0},
            {"environment": None, "short": None},
        ],
        [6.5, 6.0, None],
        [[0.5, None, 6.0], [None, 6.0], None],
    ]


def test_a_clip_and_a_penalty_are_the_last_turns(score, rollouts):
    penalty = {"max_tokens": 4, "cache": 4}
    version = score(rollouts, "environment", reward_clip=[0.0, 1.0], overlong=penalty)
    rewards, earned = cells(version, "reward", "turn_rewards")
    assert (rewards[0], earned[0]) == (0.0, [0.25, None, -0.25])  # 1.25 clipped; 4 tokens cost 1
    assert (rewards[2], earned[2]) == (None, None)


def test_a_function_may_ask_for_what_was_said(score, rollouts, tmp_path):
    version = score(rollouts, "mine.py:talk", workers=1)
    assert version.manifest.kind_schema == "rewards/1"
    assert "turn_rewards" not in version.table().column_names
    assert cells(version, "reward") == [[6.0, 4.0, None]]
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    transcripts, turns, reasons = (
        [cell for call in calls for cell in call[column]] for column in range(3)
    )
    assert next(messages for messages in transcripts if len(messages) == 6) == [
        {"role": "user", "content": "g-0"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "too low"},
        {"role": "assistant", "content": "call", "tool_calls": json.loads(CALL)},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "last"},
    ]
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


def test_one_turn_rollouts_offer_no_turns(store, policy, rollouts, score):
    single = [{k: v for k, v in row.items() if k not in ("turns", "end_reason")} for row in ROWS]
    prompts = world.write_prompts(store, single, "single")
    version = episodes.write(store, policy, single, "single", prompts)
    for use in ("environment", "mine.py:talk"):
        why = r"needs (end_reason|transcript|turns), which only episodes have"
        with pytest.raises(ConfigError, match=why):
            score(version, use)


def test_a_retry_keeps_what_turns_earned(score, rollouts, tmp_path):
    uses = ("environment", "mine.py:flaky")
    first = score(rollouts, *uses, max_invalid=0.5)
    assert cells(first, "reward") == [[2.25, None, None]]
    (tmp_path / "mine.py").write_text(MINE.replace('text == "second"', "False"))
    again = score(rollouts, *uses, max_invalid=0.5, retry=first)
    assert cells(again, "reward", "turn_rewards") == [
        [2.25, 1.0, None],
        [[0.25, None, 2.0], [None, 1.0], None],
    ]
    assert again.manifest.kind_schema == "rewards/2"


def test_turns_of_rows_that_a_person_does_not_name_stay(store, policy, score, tmp_path, rollouts):
    """Float32 makes another number of 0.7 if the last turn is computed again."""
    rows = [row(f"e-{n}", [turn(1, reward=0.7) for _ in range(3)], "") for n in range(2)]
    prompts = world.write_prompts(store, rows, run="more")
    first = score(episodes.write(store, policy, rows, run="more", prompts=prompts), "environment")
    named = OverrideConfig(author="ada", reason="it was right", overrides={"e-1": 3.0})
    version = store.open(run_here("override", named, store, rewards=first.ref))
    assert cells(version, "turn_rewards")[0][0] == cells(first, "turn_rewards")[0][0]


def test_a_person_corrects_the_last_turn(store, score, rollouts):
    first = score(rollouts, "environment")
    corrected = OverrideConfig(author="ada", reason="it was right", overrides={"e-0": 3.0})
    version = store.open(run_here("override", corrected, store, rewards=first.ref))
    assert cells(version, "reward", "turn_rewards") == [
        [3.0, None, None],
        [[0.25, None, 2.75], None, None],
    ]
    kind.check(version.table())
    scored = OverrideConfig(author="ada", reason="it was right", overrides={"e-1": 1.0})
    version = store.open(run_here("override", scored, store, rewards=first.ref))
    assert cells(version, "turn_rewards") == [[[0.25, None, 1.0], [None, 1.0], None]]
    assert with_rest([1.0], 0.5) == [0.5] and with_rest([None, None], 0.5) == [None, 0.5]
