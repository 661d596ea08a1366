"""The recipes guess and calculator: their rows, their environment, the base model; a small run of
every stage of guess."""

import doctest
import math
from pathlib import Path

import pytest
import torch

from quiver.deployments.recipes import calculator, guess
from quiver.flows.checking import look
from quiver.flows.preflight import preflight
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError
from quiver.stages.common.store import Store
from tests.writing import run_iteration

ROOT = Path(__file__).parents[2]
RECIPE = "deployments/recipes/guess.toml"
SMALL = [
    "policy.arguments={steps=30,seed=3}",
    "data.limit=16",
    "generate.samples_per_prompt=4",
    "data.held_out={arguments={split='held_out',count=12}}",
]


@pytest.mark.parametrize("module", [guess, calculator])
def test_the_examples_in_the_docstrings_of_recipes(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("number", [1, 7, 15])
def test_halving_finds_every_number_and_is_paid_one(number):
    game = guess.Guess()
    game.reset(number)
    paid = []
    while True:
        half = (game.low + game.high) // 2
        step = game.step(str(half))
        paid.append(step["reward"])
        if step.get("done"):
            break
        assert step["text"] == ("higher" if number > half else "lower")
    assert len(paid) <= 4
    assert math.fsum(paid) == pytest.approx(1.0)


def test_held_out_games_are_others_of_the_same_fifteen_numbers():
    """As guess.toml says beside them."""
    train, held_out = [*guess.rows("train")], [*guess.rows("held_out", 400)]
    assert not {row["name"] for row in train} & {row["name"] for row in held_out}
    assert {row["number"] for row in held_out} == {row["number"] for row in train}
    assert {row["number"] for row in train} == set(range(1, 16))


def test_a_guess_that_tells_nothing_is_paid_nothing():
    game = guess.Guess()
    game.reset(3)
    assert game.step("12") == {
        "text": "lower",
        "reward": pytest.approx(1 - math.log2(11) / math.log2(15)),
    }
    assert game.step("13")["reward"] == 0
    assert game.step("no number")["reward"] == 0


def test_only_what_the_teacher_says_is_a_target():
    tokenizer = guess._tokenizer()
    chat = [
        {"role": "user", "content": guess.QUESTION},
        {"role": "assistant", "content": "8"},
        {"role": "user", "content": "lower"},
        {"role": "assistant", "content": "12"},
    ]
    ids = torch.tensor([tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)])
    labels = guess._said_by_teacher(ids, tokenizer)
    assert tokenizer.convert_ids_to_tokens(labels[labels >= 0].tolist()) == [
        "8",
        "<|im_end|>",
        "12",
        "<|im_end|>",
    ]


def test_every_stage_of_a_small_game(tmp_path, monkeypatch):
    """In this process, with few rows and a model that was hardly taught."""
    monkeypatch.chdir(ROOT)
    recipe = load(RECIPE, SMALL)
    store = Store(tmp_path / "store")
    made = run_iteration(recipe, store)
    prompts = store.open(made["prompts"]).table().to_pylist()
    numbers = {row["group_id"]: row["columns"]["number"] for row in prompts}
    scored = {row["rollout_id"]: row for row in store.open(made["rewards"]).table().to_pylist()}
    for row in store.open(made["rollouts"]).table().to_pylist():
        game = guess.Guess()
        game.reset(numbers[row["group_id"]])
        paid = [game.step(turn["text"])["reward"] for turn in row["turns"]]
        is_found = float(row["turns"][-1]["text"] == str(game.number))
        reward = scored[row["rollout_id"]]
        assert reward["parts"]["found"] == is_found
        assert reward["turn_rewards"] == pytest.approx([*paid[:-1], paid[-1] + is_found])
        assert reward["reward"] == pytest.approx(math.fsum(paid) + is_found)
    metrics = store.open(made["policy"]).manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4
    assert (metrics["kept"], metrics["steps"]) == (64, 16)


def test_what_is_wrong_with_turns_is_told_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    store = f"store={tmp_path / 'store'}"
    assert preflight(load(RECIPE, [*SMALL, store])).offered_columns
    for setting, why in {
        "generate.turns.environment=quiver.deployments.recipes.guess:Gues": "did you mean Guess",
        "generate.turns.environment=gone.py:Guess": "there is no file",
        "generate.turns.parser=gone.py:parse": "there is no file",
        "generate.turns={tools=['quiver.deployments.recipes.calculator:calculat']}": (
            "did you mean calculate"
        ),
        "reward.functions=[{use='quiver.deployments.recipes.guess:found'}]": (
            "optimize.credit turn: needs the rewards of turns"
        ),
        "generate.turns={tools=['quiver.deployments.recipes.calculator:calculate']}": (
            "takes what an environment pays, and generate.turns.tools pay nothing"
        ),
        "generate.turns=null": "takes what an environment pays, and there is no",
    }.items():
        with pytest.raises(ConfigError, match=why):
            preflight(load(RECIPE, [*SMALL, store, setting]))


@pytest.mark.parametrize(
    "reset, why",
    [
        ("self, number, level", "missing 1 required positional argument: 'level'"),
        ("self, number", None),
    ],
)
def test_an_environment_is_begun_when_a_recipe_is_checked(tmp_path, monkeypatch, reset, why):
    """With the first rows of training and of evaluation; and it is asked when it is tried."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "game.py").write_text(
        "class Game:\n"
        f"    def reset({reset}):\n"
        "        return 'go'\n\n"
        "    def step(self, turn):\n"
        "        raise RuntimeError('no idea')\n"
    )
    environment = f"{tmp_path}/game.py:Game"
    settings = [
        "policy.arguments={steps=1,seed=3}",
        f"store={tmp_path / 'store'}",
        f"generate.turns.environment={environment}",
    ]
    recipe = load(RECIPE, [*SMALL, *settings])
    if why is None:
        looked = look(recipe, Path(RECIPE), is_tried=True)
        assert [each["looked_at"] for each in looked.answer["prompts"].values()] == [8, 8]
        assert looked.error.object == f"generate.turns {environment}"
        assert "fails on the answer 'nothingnothingnothing': " in looked.error.message
        assert "RuntimeError: no idea" in looked.error.message
        return
    with pytest.raises(ConfigError, match=why):
        look(recipe, Path(RECIPE), is_shown=True)


def test_a_recipe_with_an_environment_is_checked(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    settings = ["policy.arguments={steps=1,seed=3}", f"store={tmp_path / 'store'}"]
    looked = look(load(RECIPE, [*SMALL, *settings]), Path(RECIPE), is_tried=True)
    assert looked.error is None
    assert looked.answer["rewards"] == {
        "environment": {"values": [0.0], "error": None},
        "found": {"values": [0.0], "error": None},
    }
    assert looked.answer["tried"] == ["generate", "reward", "optimize"]
    assert looked.answer["warnings"] == []


@pytest.mark.parametrize(
    "expression", ["2 ** 9", "__import__('os')", "1" * 41, "1 + 2.5", "'a' * 3", "1 +", "True + 1"]
)
def test_the_calculator_does_sums_alone(expression):
    with pytest.raises((ValueError, SyntaxError)):
        calculator.calculate(expression)


def test_held_out_sums_stand_in_no_training_row():
    splits = {
        split: {row["question"] for row in calculator.rows(split, seed, 1000)}
        for seed in (0, 1)
        for split in ("train", "held_out")
    }
    assert not splits["train"] & splits["held_out"]
    row = next(calculator.rows("held_out"))
    assert eval(row["question"].removesuffix("=")) == row["answer"]
    assert row["messages"][-1]["content"] == row["question"]
