"""`quiver import-rollouts`: trajectories of another system, which training takes or its audit
refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.stages.common.models.loading import load_model
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from tests import episodes
from tests.flows.conftest import quiver_each, write_recipe
from tests.tiny import make_policy

KL = ["--set", "optimize.kl_coef=0.1"]


def sampled(store: Store, **options) -> list[dict]:
    """Rows of rollouts/2 that the tiny policy really sampled."""
    policy = store.open("tiny/policy@0")
    asked = episodes.prompts(4)
    return episodes.sample(load_model(policy, dtype=torch.float32), asked, 4, **options)


def lines_of(rows: list[dict], *, turns: bool) -> list[dict]:
    """The same as another system would have written them."""
    lines = []
    for row in rows:
        line = {
            "group_id": row["group_id"],
            "prompt_ids": row["prompt_ids"],
            "completion_ids": row["completion_ids"],
            "logprobs": [float(np.float32(logprob)) for logprob in row["old_logprobs"]],
        }
        rewards = episodes.even_ids(row)
        if turns:
            line["turns"] = [
                {
                    "length": turn["length"],
                    "observation_ids": turn["observation_ids"],
                    "restart_ids": turn["restart_ids"],
                    "observation": turn["observation"],
                    "reward": reward,
                }
                for turn, reward in zip(row["turns"], rewards, strict=True)
            ]
        else:
            line["reward"] = rewards[0]
        lines.append(line)
    return lines


def write(folder: Path, lines: list[dict], name: str = "trajectories.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def take_over(*options: str, name: str = "trajectories.jsonl") -> list[str]:
    return ["import-rollouts", name, "--policy", "tiny/policy@0", "--store", "store", *options]


@pytest.fixture
def workplace(tmp_path) -> Path:
    """A recipe, and `tiny/policy@0` in its store."""
    write_recipe(tmp_path)
    make_policy(Store(tmp_path / "store"))
    return tmp_path


def test_honest_episodes_are_trained_on(workplace):
    """rollouts/2 and rewards/2, row by row what the lines say; the audit finds rounding alone."""
    store = Store(workplace / "store")
    rows = sampled(store)
    write(workplace, lines_of(rows, turns=True))
    train = ["optimize", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--rewards"]
    (_, made), (_, again), (code, outcome) = quiver_each(
        workplace,
        take_over(),
        take_over(),
        [*train, "tiny/rewards@1", *KL, "--set", "optimize.credit=turn"],
    )
    assert (made["rollouts"]["ref"], made["rewards"]["ref"]) == (
        "tiny/rollouts@1",
        "tiny/rewards@1",
    )
    assert again["rollouts"]["cached"] and again["rewards"]["cached"]
    rollouts, rewards = store.open("tiny/rollouts@1"), store.open("tiny/rewards@1")
    kinds = (rollouts.manifest.kind_schema, rewards.manifest.kind_schema)
    assert kinds == ("rollouts/2", "rewards/2")
    table = rollouts.table().to_pylist()
    for row, written, reward in zip(rows, table, rewards.table().to_pylist(), strict=True):
        for name in ("group_id", "sample_index", "prompt_ids", "completion_ids", "old_logprobs"):
            assert written[name] == pytest.approx(row[name]) if name[0] == "o" else row[name]
        for turn, written_turn in zip(row["turns"], written["turns"], strict=True):
            for name in ("length", "observation_ids", "restart_ids", "observation"):
                assert written_turn[name] == turn[name]
        assert written["finish_reason"] == row["finish_reason"]
        assert reward["turn_rewards"] == pytest.approx(episodes.even_ids(row))
        assert reward["reward"] == pytest.approx(sum(episodes.even_ids(row)), abs=1e-6)
    longest = max(len(row["completion_ids"]) for row in rows)
    assert rollouts.manifest.config["turns"] == {"max_tokens": longest}
    assert rollouts.manifest.config["sampling"]["temperature"] == 1.0
    assert code == 0 and outcome["ref"] == "tiny/policy@1", outcome
    audit = outcome["metrics"]["audit"]
    assert audit["mean_gap"] < 1e-5 and audit["rollouts"] == 16
    assert verify(store)[1] == []


def test_answers_of_one_turn_are_rollouts_1(workplace):
    store = Store(workplace / "store")
    rows = sampled(store, most_turns=1, temperature=0.7)
    lines = [{**line, "temperature": 0.7} for line in lines_of(rows, turns=False)]
    del lines[0]["reward"]
    write(workplace, lines)
    (_, made), (code, outcome) = quiver_each(
        workplace,
        take_over("--into", "theirs", "--set", "sampling.max_tokens=9"),
        [
            "optimize",
            "recipe.toml",
            "--rollouts",
            "theirs/rollouts@1",
            "--rewards",
            "theirs/rewards@1",
        ],
    )
    rollouts, rewards = store.open(made["rollouts"]["ref"]), store.open(made["rewards"]["ref"])
    kinds = (rollouts.manifest.kind_schema, rewards.manifest.kind_schema)
    assert kinds == ("rollouts/1", "rewards/1")
    assert rollouts.manifest.config["sampling"]["max_tokens"] == 9
    assert rewards.table()["reward"].to_pylist()[0] is None
    assert rewards.manifest.status == {"scored": 15, "not_scored": 1, "failed": 0}
    assert code == 0, outcome
    assert outcome["metrics"]["audit"]["mean_gap"] < 1e-5
    assert outcome["metrics"]["dropped"] == {"not_scored": 1}


@pytest.mark.parametrize("lie", ["text", "temperature"])
def test_logprobs_of_something_else_are_refused(workplace, lie):
    """Those of another answer, or at another temperature than is said."""
    store = Store(workplace / "store")
    rows = sampled(store, temperature=1.0 if lie == "text" else 2.0)
    lines = lines_of(rows, turns=True)
    if lie == "text":
        others = [line["logprobs"] for line in lines]
        for line, other in zip(lines, others[5:] + others[:5], strict=True):
            line["logprobs"] = (other * len(line["logprobs"]))[: len(line["logprobs"])]
    write(workplace, lines)
    (_, made), (code, outcome) = quiver_each(
        workplace,
        take_over(),
        ["optimize", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--rewards", "tiny/rewards@1"],
    )
    assert made["rollouts"]["rows"] == 16
    assert (code, outcome["error"]["code"]) == (8, "E-NUMERIC")
    assert "audit" in outcome["error"]["object"]
    assert store.numbers("tiny", "policy") == [0]


GOOD = {"prompt_ids": [1, 40], "completion_ids": [45, 46, 2], "logprobs": [-0.3, -1.5, 0.0]}
TURNS = [{"length": 2, "observation_ids": [50]}, {"length": 1}]


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"logprobs": [-0.3, -1.5]}, "logprobs has 2 items, completion_ids has 3"),
        ({"logprobs": [-0.3, 0.5, 0]}, "logprobs.1"),
        ({"logprobs": [-0.3, -1e400, 0]}, "logprobs.1"),
        ({"logprobs": [-0.3, None, 0]}, "logprobs.1"),
        ({"logprobs": [-0.3, "-1", 0]}, "logprobs.1"),
        ({"completion_ids": [45, 320, 2]}, "completion_ids holds 320"),
        ({"completion_ids": [45, -1, 2]}, "completion_ids.1"),
        ({"completion_ids": [45, 1.5, 2]}, "completion_ids.1"),
        ({"completion_ids": [45, True, 2]}, "completion_ids.1"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [1] * 254}, "a sequence has 257 tokens"),
        ({"group_id": "g", "prompt_ids": [1, 41]}, "prompt_ids: group g has others"),
        ({"temperature": -1}, "temperature"),
        ({"finish_reason": "done"}, "finish_reason"),
        ({"reward": 1e39}, "reward"),
        ({"logprob": [0]}, "unknown key logprob"),
        ({"turns": []}, "turns"),
        ({"turns": TURNS[:1]}, "their lengths add up to 2"),
        ({"turns": [{**TURNS[0], "restart_ids": [4]}, TURNS[1]]}, "turns.0.restart_ids"),
        ({"turns": [TURNS[0], {**TURNS[1], "observation_ids": [4]}]}, "turns.1.observation_ids"),
        ({"turns": [TURNS[0], {**TURNS[1], "restart_ids": [4]}]}, "turns.0.observation_ids"),
        ({"turns": [{**TURNS[0], "observation_ids": [999]}, TURNS[1]]}, "turns.0.observation_ids holds 999"),
        ({"turns": [{**TURNS[0], "reward": 1.0}, TURNS[1]], "reward": 2.0}, "add up to 1"),
        ({"turns": [TURNS[0], {**TURNS[1], "finish_reason": "stop"}], "finish_reason": "length"}, "finish_reason length"),
        ({"turns": [{**TURNS[0], "tool_calls": [{"arguments": {}}]}, TURNS[1]]}, "turns.0.tool_calls.0.name"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_field_and_nothing_is_written(
    tmp_path, monkeypatch, changed, words
):
    from quiver.flows.commands import episodes as commands
    from quiver.schemas.errors import ConfigError

    store = bad_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    lines = [{**GOOD, "group_id": "g", "reward": 1.0}, {**GOOD, "group_id": "h", **changed}]
    text = "".join(json.dumps(line) + "\n\n" for line in lines).replace("-Infinity", "-1e400")
    (tmp_path / "bad.jsonl").write_text(text)
    with pytest.raises(ConfigError) as caught:
        commands.import_rollouts(Path("bad.jsonl"), "tiny/policy@0", store=str(store.path))
    assert "bad.jsonl line 3" in caught.value.object
    assert words in caught.value.message
    assert store.numbers("tiny", "rollouts") == store.numbers("tiny", "rewards") == []


def bad_store(folder: Path) -> Store:
    store = Store(folder / "store")
    make_policy(store)
    return store


def test_a_file_that_is_no_json_or_is_not_there(workplace):
    (workplace / "broken.jsonl").write_text(json.dumps(GOOD) + "\n{\n")
    (workplace / "empty.jsonl").write_text("\n")
    names = ("broken.jsonl", "empty.jsonl", "absent.jsonl")
    answers = quiver_each(workplace, *(take_over(name=name) for name in names))
    assert [code for code, _ in answers] == [2, 2, 2]
    assert "line 2" in answers[0][1]["error"]["object"]
    (_, bad), (_, foreign) = quiver_each(
        workplace,
        take_over("--set", "sampling.top_q=1"),
        take_over("--policy", "tiny/rollouts@1"),
    )
    assert "top_q" in bad["error"]["message"] or "no file" in bad["error"]["message"]
    assert foreign["error"]["code"] in ("E-LINEAGE", "E-CONFIG")


def test_lines_that_answer_saved_prompts_can_be_scored_again(workplace):
    """With the prompts named, another reward needs no more than a recipe."""
    answers = quiver_each(workplace, ["prompt", "recipe.toml", "--set", "data.limit=2"])
    store = Store(workplace / "store")
    prompts = store.open(answers[0][1]["ref"]).table().to_pylist()
    lines = [
        {**GOOD, "group_id": row["group_id"], "prompt_ids": row["prompt_ids"]} for row in prompts
    ]
    write(workplace, lines)
    write(workplace, [{**lines[0], "group_id": "nobody"}], "other.jsonl")
    (_, made), (_, refused), (code, scored) = quiver_each(
        workplace,
        take_over("--prompts", answers[0][1]["ref"]),
        take_over("--prompts", answers[0][1]["ref"], name="other.jsonl"),
        ["reward", "recipe.toml", "--rollouts", "tiny/rollouts@1"],
    )
    assert "rewards" not in made and made["rollouts"]["rows"] == 2
    assert "has no nobody" in refused["error"]["message"]
    assert code == 0, scored
    assert scored["metrics"]["reward_mean"] == pytest.approx(2 / 3)
    texts = store.open(made["rollouts"]["ref"]).table()["completion_text"].to_pylist()
    assert len(set(texts)) == 1 and "<|im_end|>" not in texts[0]
