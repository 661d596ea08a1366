"""`quiver import`: trajectories of another system, which training takes or its audit
refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.flows.calls import by_hand
from quiver.flows.cli import episodes as commands
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, NumericError, QuiverError
from quiver.stages.core.run.runner import Outcome
from quiver.stages.core.store import Store
from quiver.stages.model.loading import load_model
from tests import episodes
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy, tokenizer
from tests.writing import run_here, write_lines

RECIPE = """
run = "tiny"
[policy]
model = "model"
[data]
source = "questions.jsonl"
[generate]
engine = "transformers"
[reward]
[[reward.functions]]
use = "numeric"
[optimize]
device = "cpu"
"""
ROLLOUTS, REWARDS = "tiny/rollouts@1", "tiny/rewards@1"
OF_A_TURN = ("length", "observation_ids", "restart_ids", "observation")


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
                {**{name: turn[name] for name in OF_A_TURN}, "reward": reward}
                for turn, reward in zip(row["turns"], rewards, strict=True)
            ]
        else:
            line["reward"] = rewards[0]
        lines.append(line)
    return lines


FILE = Path("trajectories.jsonl")


def take_over(lines: list[dict] | None = None, policy="tiny/policy@0", **options) -> None:
    """The command, in this process: on these lines, or on what is in the file."""
    if lines:
        write_lines(FILE, lines)
    commands.import_(FILE, policy, store="store", **options)


def optimized(*settings: str) -> Outcome:
    """A step on the trajectories that were taken over."""
    recipe = load("recipe.toml", ["store=store", *settings])
    with by_hand(recipe):
        return rerun(recipe, "optimize", {"rollouts": ROLLOUTS, "rewards": REWARDS})


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A recipe, and `tiny/policy@0` in its store."""
    folder = tmp_path_factory.mktemp("imported")
    (folder / "recipe.toml").write_text(RECIPE)
    make_policy(Store(folder / "store"))
    return folder


@pytest.fixture
def store(original, tmp_path, monkeypatch) -> Store:
    """That of a copy of it, which is the working folder."""
    monkeypatch.chdir(shutil.copytree(original, tmp_path, dirs_exist_ok=True))
    return Store(tmp_path / "store")


def test_honest_episodes_are_trained_on(store, command):
    """rollouts/2 and rewards/2, row by row what the lines say; the audit finds rounding alone."""
    rows = sampled(store)
    lines = lines_of(rows, turns=True)
    write_lines(FILE, lines)
    named = ("trajectories.jsonl", "--policy", "tiny/policy@0", "--store", "store")
    code, made = command("import", *named)
    assert code == 0
    assert (made["rollouts"]["ref"], made["rewards"]["ref"]) == (ROLLOUTS, REWARDS)
    rollouts, rewards = store.open(ROLLOUTS), store.open(REWARDS)
    kinds = (rollouts.manifest.kind_schema, rewards.manifest.kind_schema)
    assert kinds == ("rollouts/2", "rewards/2")
    table = rollouts.table().to_pylist()
    for row, written, reward in zip(rows, table, rewards.table().to_pylist(), strict=True):
        for name in ("group_id", "sample_index", "prompt_ids", "completion_ids", "finish_reason"):
            assert written[name] == row[name]
        assert written["old_logprobs"] == pytest.approx(row["old_logprobs"])
        for turn, written_turn in zip(row["turns"], written["turns"], strict=True):
            for name in OF_A_TURN:
                assert written_turn[name] == turn[name]
        assert reward["turn_rewards"] == pytest.approx(episodes.even_ids(row))
        assert reward["reward"] == pytest.approx(sum(episodes.even_ids(row)), abs=1e-6)
    longest = max(len(row["completion_ids"]) for row in rows)
    assert rollouts.manifest.config["turns"] == {"max_tokens": longest}
    assert rollouts.manifest.config["sampling"]["temperature"] == 1.0
    outcome = optimized("optimize.credit=turn")
    assert outcome.ref == "tiny/policy@1"
    audit = outcome.metrics["audit"]
    assert audit["mean_gap"] < 1e-5 and audit["rollouts"] == 16
    take_over(lines)
    assert (store.numbers("tiny", "rollouts"), store.numbers("tiny", "rewards")) == ([1], [1])
    assert verify(store)[1] == []


def test_answers_of_one_turn_are_rollouts_1(store):
    rows = sampled(store, most_turns=1, temperature=0.7)
    lines = [{**line, "temperature": 0.7} for line in lines_of(rows, turns=False)]
    del lines[0]["reward"]
    take_over(lines, into="theirs", settings=["sampling.max_tokens=9"])
    made = store.open("theirs/rollouts@1"), store.open("theirs/rewards@1")
    manifests = [version.manifest for version in made]
    assert [each.kind_schema for each in manifests] == ["rollouts/1", "rewards/1"]
    sampling = manifests[0].config["sampling"]
    assert (sampling["max_tokens"], sampling["temperature"]) == (9, 0.7)
    assert made[1].table()["reward"].to_pylist()[0] is None
    assert manifests[1].status == {"scored": 15, "not_scored": 1, "failed": 0}
    metrics = world.trained(store, store.open("tiny/policy@0"), made).manifest.metrics
    assert metrics["audit"]["mean_gap"] < 1e-5
    assert metrics["dropped"] == {"not_scored": 1}


def test_a_kl_term_and_another_reward_of_the_same_rollouts(store):
    """Logprobs under the reference need no more than a file's rollouts; rewards the prompts too."""
    rows = sampled(store)
    take_over(lines_of(rows, turns=True), prompts=str(world.write_prompts(store, rows).ref))
    outcome = optimized("optimize.kl_coef=0.1")
    assert store.numbers("tiny", "logprobs") == [1]
    assert outcome.metrics["audit"]["mean_gap"] < 1e-5
    scored = run_here(
        "reward", {"functions": [{"use": "environment"}]}, store, rollouts="tiny/rollouts@1"
    )
    first = store.open("tiny/rewards@1").table()["reward"].to_pylist()
    assert store.open(scored).table()["reward"].to_pylist() == pytest.approx(first)


@pytest.mark.parametrize(
    ("temperature", "shift", "said"), [(1.0, 5, "audit"), (2.0, 0, "another temperature")]
)
def test_logprobs_of_other_answers_or_another_temperature_are_refused(
    store, temperature, shift, said
):
    lines = lines_of(sampled(store, temperature=temperature), turns=True)
    others = [line["logprobs"] for line in lines]
    for line, other in zip(lines, others[shift:] + others[:shift], strict=True):
        line["logprobs"] = (other * len(line["logprobs"]))[: len(line["logprobs"])]
    take_over(lines)
    with pytest.raises(NumericError, match=said):
        optimized()
    assert store.numbers("tiny", "policy") == [0]


GOOD = {"prompt_ids": [1, 40], "completion_ids": [45, 46, 2], "logprobs": [-0.3, -1.5, 0.0]}
TURNS = [{"length": 2, "observation_ids": [50]}, {"length": 1}]


def test_a_step_on_rollouts_of_another_temperature_says_which_it_uses(store, caplog):
    lines = lines_of(sampled(store, temperature=0.5), turns=True)
    take_over([{**line, "temperature": 0.5} for line in lines])
    caplog.set_level("INFO", "quiver")
    assert optimized().ref == "tiny/policy@1"
    assert "optimize of            tiny/rewards@1, tiny/rollouts@1, tiny/policy@0" in caplog.text
    said = [record.getMessage() for record in caplog.records if "temperature" in record.msg]
    assert said == [
        "tiny/rollouts@1 was sampled at temperature 0.5, and generate.sampling.temperature is 1: "
        "the step uses the temperature that is stored with each rollout"
    ]
    caplog.clear()
    optimized("generate.sampling.temperature=0.5")
    assert not [record for record in caplog.records if "temperature" in record.msg]


@pytest.mark.parametrize(
    ("temperatures", "settings", "expected", "of_the_whole"),
    [
        ([None, None, None], [], [1.0, 1.0, 1.0], 1.0),
        ([None, None, None], ["sampling.temperature=0.5"], [0.5, 0.5, 0.5], 0.5),
        ([0.25, None, 0.25], ["sampling.temperature=0.5"], [0.25, 0.5, 0.25], 0.5),
        ([0.25, 2.0, 0.25], ["sampling.temperature=0.5"], [0.25, 2.0, 0.25], 0.25),
        ([0.0, None, 0.0], ["sampling.temperature=0.5"], [0.0, 0.5, 0.0], 0.5),  # 0 says greedy
    ],
)
def test_lines_that_say_no_temperature_have_that_of_the_import(
    store, temperatures, settings, expected, of_the_whole
):
    lines = [{**GOOD, "temperature": temperature} for temperature in temperatures]
    take_over(
        [{k: v for k, v in line.items() if v is not None} for line in lines], settings=settings
    )
    rollouts = store.open("tiny/rollouts@1")
    assert rollouts.table()["temperature"].to_pylist() == expected
    assert rollouts.manifest.config["sampling"]["temperature"] == of_the_whole


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"logprobs": [-0.3, -1.5]}, "logprobs has 2 items, completion_ids has 3"),
        ({"logprobs": [-0.3, 0.5, 0]}, "logprobs.1"),
        ({"logprobs": [-0.3, -1e400, 0]}, "-1e400 is more than a float holds"),
        ({"logprobs": [-0.3, None, 0]}, "logprobs.1"),
        ({"completion_ids": [45, 320, 2]}, "completion_ids holds 320"),
        ({"completion_ids": [45, -1, 2]}, "completion_ids.1"),
        ({"completion_ids": [45, True, 2]}, "completion_ids.1"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [1] * 254}, "a sequence has 257 tokens"),
        ({"group_id": "g", "prompt_ids": [1, 41]}, "prompt_ids: group g has others"),
        ({"group_id": "g", "columns": {"answer": 1}}, "columns: group g has others in an earlier line"),
        ({"group_id": "g", "tools": [{"name": "f"}]}, "tools: group g has others in an earlier line"),
        ({"temperature": -1}, "temperature"),
        ({"finish_reason": "done"}, "finish_reason"),
        ({"reward": 1e39}, "reward"),
        ({"logprob": [0]}, "unknown key logprob"),
        ({"paid": []}, "paid: the line has no turns"),
        ({"turns": TURNS, "paid": [1.0]}, "paid has 1 items, turns has 2"),
        ({"turns": TURNS[:1]}, "their lengths add up to 2"),
        ({"turns": [{**TURNS[0], "restart_ids": [4]}, TURNS[1]]}, "turns.0.restart_ids"),
        ({"turns": [TURNS[0], {**TURNS[1], "observation_ids": [4]}]}, "turns.1.observation_ids"),
        ({"turns": [TURNS[0], {**TURNS[1], "restart_ids": [4]}]}, "turns.0.observation_ids"),
        ({"turns": [{**TURNS[0], "observation_ids": [999]}, TURNS[1]]}, "turns.0.observation_ids holds 999"),
        ({"turns": [{**TURNS[0], "reward": 1.0}, TURNS[1]], "reward": 2.0}, "add up to 1"),
        ({"turns": [{**TURNS[0], "reward": 3e38}, {**TURNS[1], "reward": 3e38}]}, "add up to 6e+38"),
        ({"turns": [TURNS[0], {**TURNS[1], "finish_reason": "abort", "reward": 1.0}]}, "must have no reward"),
        ({"turns": [TURNS[0], {**TURNS[1], "finish_reason": "stop"}], "finish_reason": "length"}, "finish_reason length"),
        ({"turns": [{**TURNS[0], "tool_calls": [{"arguments": {}}]}, TURNS[1]]}, "turns.0.tool_calls.0: the call lacks"),
        ({"finish_reason": "abort", "reward": 1.0}, "reward: a trajectory with finish_reason abort must have no reward"),
        ({"turns": [TURNS[0], {**TURNS[1], "reward": 1.0}], "finish_reason": "abort"}, "must have no reward"),
        ({"turns": [{**TURNS[0], "finish_reason": "abort"}, TURNS[1]]}, "turns.0.finish_reason: abort ends an episode"),
    ],
)  # fmt: skip
def test_a_bad_line_is_named_with_its_field_and_nothing_is_written(store, changed, words):
    lines = [{**GOOD, "group_id": "g", "reward": 1.0}, {**GOOD, "group_id": "h", **changed}]
    text = "".join(json.dumps(line) + "\n\n" for line in lines).replace("-Infinity", "-1e400")
    FILE.write_text(text)
    with pytest.raises(ConfigError) as caught:
        take_over()
    assert "trajectories.jsonl line 3" in caught.value.object
    assert words in caught.value.message
    assert store.numbers("tiny", "rollouts") == store.numbers("tiny", "rewards") == []


@pytest.mark.parametrize(
    "text, options, words",
    [
        ("GOOD\n{\n", {}, "line 2: is not JSON"),
        (
            'GOOD\n{"prompt_ids": [1], "completion_ids": [2], "logprobs": [-1.0], "turns": [{"length": 1, "tool_calls": [{"name": "f", "arguments": {"a": 1e400}}]}]}\n',
            {},
            "line 2: cannot be read: 1e400 is more than a float holds",
        ),
        ("GOOD\n[1]\n", {}, "line 2: expected an object, found list"),
        ("\n", {}, "has no lines"),
        (None, {}, "there is no file"),
        ("GOOD\n", {"settings": ["sampling.top_q=1"]}, "unknown key sampling.top_q"),
        ("GOOD\n", {"settings": ["sampling.max_tokens=2"]}, "sampling.max_tokens is 2"),
        ("GOOD\n", {"prompts": "tiny/policy@0"}, "is not a version of prompts"),
    ],
)
def test_what_is_wrong_as_a_whole_is_said(store, text, options, words):
    if text is not None:
        FILE.write_text(text.replace("GOOD", json.dumps(GOOD)))
    with pytest.raises(QuiverError) as caught:
        take_over(**options)
    assert words in f"{caught.value.object}: {caught.value.message}"


def test_lines_of_saved_prompts_must_have_their_ids(store):
    prompts = world.write_prompts(store, [{**GOOD, "group_id": "g"}])
    for line, words in (
        ({**GOOD, "group_id": "nobody"}, "has no nobody"),
        ({**GOOD, "group_id": "g", "prompt_ids": [1]}, f"has others in {prompts.ref}"),
    ):
        with pytest.raises(ConfigError, match=words):
            take_over([line], prompts=str(prompts.ref))


def test_a_prompt_of_no_tools_is_one_without_tools(store):
    take_over([{**GOOD, "group_id": "g", "tools": []}, {**GOOD, "group_id": "g"}])
    assert store.open("tiny/prompts@1").table().to_pylist()[0].get("tools") is None
    assert store.open("tiny/rollouts@1").table().num_rows == 2


def test_a_reward_of_the_whole_is_the_last_turns(store):
    """Where other lines have rewards of turns."""
    turns = [{**TURNS[0], "reward": 0.25}, TURNS[1]]
    take_over([{**GOOD, "turns": turns}, {**GOOD, "turns": TURNS, "reward": 1.0}])
    rewards = store.open("tiny/rewards@1").table()
    assert rewards["turn_rewards"].to_pylist() == [[0.25, None], [None, 1.0]]


def test_a_model_without_an_end_token_may_have_ignored_it(store):
    """As for `generate`: then no id ends a turn, unless the import names it."""
    folder = make_folder(Path("endless"))
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, "eos_token_id": None}))
    policy = run_here("policy", {"model": str(folder)}, store, into="endless")
    with pytest.raises(ConfigError, match="names no end token") as caught:
        take_over([GOOD], str(policy))
    assert "ignore_eos = true" in caught.value.next
    for number, settings, reason in (
        (1, [], "length"),
        (2, [f"sampling.stop_token_ids=[{GOOD['completion_ids'][-1]}]"], "stop"),
    ):
        settings += ["sampling.ignore_eos=true"]
        take_over([GOOD], str(policy), settings=settings)
        rows = store.open(f"endless/rollouts@{number}").table()
        assert rows["finish_reason"].to_pylist() == [reason]


def test_what_a_line_does_not_say_is_filled_in(store):
    """Groups by the prompt, the reason by the last id, texts decoded."""
    line = {**GOOD, "completion_ids": [45, 2, 46]}
    take_over([GOOD, line, {**line, "turns": TURNS}, {**GOOD, "prompt_ids": [3]}])
    rows = store.open("tiny/rollouts@1").table().to_pylist()
    groups = [row["group_id"] for row in rows]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert [row["sample_index"] for row in rows] == [0, 1, 2, 0]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "length", "stop"]
    ends = ["answered", "max_tokens", "max_tokens", "answered"]
    assert [row["end_reason"] for row in rows] == ends
    decode = tokenizer().decode
    assert [turn["text"] for turn in rows[2]["turns"]] == [decode([45]), decode([46])]
    assert rows[2]["turns"][0]["observation"] == decode([50])
    assert rows[0]["completion_text"] == decode([45, 46])
