"""The shipped recipes guess, calculator, squares and t5_ppo: their rows, rewards, environment and
base models, a small run of every stage, and what people see of pictures."""

import base64
import doctest
import json
import math
import random
import re
import subprocess
from collections import Counter
from contextlib import chdir
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.deployments.recipes import calculator, guess, squares, t5_digits, tones
from quiver.flows.checking import look
from quiver.flows.look.describe import describe
from quiver.flows.look.samples import best_and_worst, groups
from quiver.flows.look.stage import write
from quiver.flows.preflight import preflight
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.model.media.decoder import open_clip, open_image
from tests.browser import needs_chromium
from tests.writing import run_here, run_iteration

ROOT = Path(__file__).parents[2]
RECIPE = "deployments/recipes/guess.toml"
SMALL = [
    "policy.arguments={steps=30,seed=3}",
    "data.limit=16",
    "generate.samples_per_prompt=4",
    "data.held_out={arguments={split='held_out',count=12}}",
]


@pytest.mark.parametrize("module", [guess, calculator, squares, tones])
def test_the_examples_in_the_docstrings_of_recipes(module):
    assert doctest.testmod(module).failed == 0


def test_no_recipe_names_a_dtype_that_fits_one_kind_of_device_alone():
    for path in (ROOT / "deployments/recipes").glob("*.toml"):
        recipe = load(path)
        assert (recipe.generate.dtype, recipe.generate.device) == ("auto", "auto"), path.name
        assert (recipe.optimize.precision, recipe.logprobs.precision) == ("auto", "auto"), path.name


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
    recipe = load(RECIPE, [*SMALL, "data.limit=8", "optimize.minibatches=8"])
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
    assert (metrics["kept"], metrics["steps"]) == (32, 8)


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
            "takes the rewards of an environment, and generate.turns.tools give none"
        ),
        "generate.turns=null": "takes the rewards of an environment, and there is no",
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


# -- squares

SQUARES = "deployments/recipes/squares.toml"
SMALL_SQUARES = [
    "policy.arguments={steps=5,seed=3}",
    "data.limit=8",
    "generate.samples_per_prompt=4",
    "data.held_out={arguments={split='held_out',count=6}}",
]


def test_a_picture_shows_what_its_answer_says():
    for row in squares.rows("train", count=50):
        pixels = np.array(open_image(row["picture"]["bytes"]))
        words = row["answer"].split()
        for half, colour, side in ((0, *words[:2]), (1, *words[2:])):
            part = pixels[16 * half : 16 * half + 16]
            found = (part == squares.COLOURS[colour]).all(-1)
            assert found.sum() == squares.SIDE**2
            assert (found.nonzero()[1] < 16).all() == (side == "left")


def test_a_clip_sounds_as_its_answer_says():
    for row in tones.rows("train", count=50):
        samples, rate = open_clip(row["clip"]["bytes"])
        for part, word in zip(samples.reshape(4, -1), row["answer"].split(), strict=True):
            hertz = np.abs(np.fft.rfft(part)).argmax() * rate / len(part)
            assert abs(hertz / tones.PITCHES[word] - 1) < 0.12


@pytest.mark.parametrize(
    ("said", "share"),
    [
        ("red left blue right", 1.0),
        ("red left blue left", 0.75),
        ("blue right red left", 0.0),
        ("red left blue", 0.0),
        ("red left blue right red", 0.0),
    ],
)
def test_each_right_word_counts_where_there_are_four(said, share):
    assert squares.right_words([said], ["red left blue right"]) == [share]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Every stage of a small run: its store, and the versions by kind."""
    with chdir(ROOT):
        recipe = load(SQUARES, SMALL_SQUARES)
        store = Store(tmp_path_factory.mktemp("squares") / "store")
        return store, run_iteration(recipe, store)


@pytest.fixture(scope="module")
def page(made) -> Path:
    """The report of the run."""
    store, _ = made
    return write(store, "squares")


def test_every_stage_of_small_squares(made, page):
    store, refs = made
    assert store.open(refs["policy"]).manifest.metrics["audit"]["max_gap"] < 1e-4

    for kind in ("prompts", "rollouts", "rewards"):
        lines = describe(store, store.open(refs[kind]), rows=1)
        assert any("PNG, 32 × 32" in line for line in lines if "picture" in line)
    stored = {
        row["group_id"]: row["images"][0]["bytes"]
        for row in store.open(refs["prompts"]).table().to_pylist()
    }
    rewards = store.open(refs["rewards"])
    samples = best_and_worst(store, rewards).rows
    assert len(samples) == 10
    for row in samples:
        (image,) = row["images"]
        assert image["bytes"] == stored[row["group_id"]]
    urls = re.findall(
        r'<img src="data:image/png;base64,([^"]+)" alt="picture 1">', page.read_text()
    )
    assert len(urls) >= 10
    shown = open_image(base64.b64decode(urls[0]))
    first = samples[0]["images"][0]["bytes"]
    assert (np.array(shown) == np.array(open_image(first))).all()
    assert all(len(group["rows"][0]["images"]) == 1 for group in groups(store, rewards))


def test_the_reports_own_policy_lets_its_pictures_show_and_nothing_else(page):
    content = page.read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', content)
    directives = dict(part.split(maxsplit=1) for part in policy.split("; "))
    assert directives == {
        "default-src": "'none'",
        "img-src": "data:",
        "media-src": "data:",
        "style-src": "'unsafe-inline'",
    }
    assert {url.partition(":")[0] for url in re.findall(r'\ssrc="([^"]+)"', content)} == {"data"}


@needs_chromium
def test_a_browser_shows_every_picture_of_the_report(page, tmp_path):
    """The page runs no script, so a page around it looks."""
    around = tmp_path / "around.html"
    around.write_text(
        f'''<iframe src="{page.as_uri()}"></iframe><p id="widths"></p><script>
        onload = () => document.getElementById("widths").textContent = JSON.stringify(
            [...document.querySelector("iframe").contentDocument.images].map(x => x.naturalWidth))
        </script>'''
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = ["chromium", *options, profile, "--dump-dom", around.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    (widths,) = re.findall(r'<p id="widths">([^<]+)</p>', done.stdout)
    assert len(json.loads(widths)) >= 10 and {*json.loads(widths)} == {32}


# -- t5_ppo

T5_PPO = "deployments/recipes/t5_ppo.toml"


def test_held_out_digits_stand_in_no_training_row_in_any_order():
    splits = {
        split: [list(t5_digits.rows(split, seed, 2000)) for seed in (0, 1)]
        for split in ("train", "held_out")
    }
    for rows in (each for both in splits.values() for each in both):
        assert len({row["digits"] for row in rows}) == 2000
        assert all(Counter(row["digits"]) == Counter(row["answer"]) for row in rows)
        assert all(
            a <= b for row in rows for a, b in zip(row["answer"], row["answer"][1:], strict=False)
        )
        assert {len(row["digits"]) for row in rows} == {5, 6, 7, 8}
    assert splits["train"][0] != splits["train"][1] and splits["train"][0] == list(
        t5_digits.rows("train", 0, 2000)
    )
    train, held_out = (
        {row["answer"] for rows in splits[split] for row in rows} for split in ("train", "held_out")
    )
    assert not train & held_out


@pytest.mark.parametrize(
    ("completion", "answer", "share"),
    [
        ("12579", "12579", 1),
        ("12597", "12579", 3 / 5),
        ("125", "12579", 3 / 5),
        ("1257999", "12579", 5 / 7),
        ("", "12579", 0),
    ],
)
def test_the_reward_is_the_share_of_digits_in_place(completion, answer, share):
    assert t5_digits.in_place([completion], [answer]) == [share]


def test_a_careless_teacher_swaps_neighbours_only():
    rng, shown = random.Random(0), Counter()
    for _ in range(3000):
        shown[t5_digits._taught("321", 0.25, rng)] += 1
    chances = Counter()
    for first, second in product(
        (True, False), repeat=2
    ):  # written out: 123, then 1|2, then the second|third
        digits = ["2", "1", "3"] if first else ["1", "2", "3"]
        digits = [digits[0], digits[2], digits[1]] if second else digits
        chances["".join(digits)] += (0.25 if first else 0.75) * (0.25 if second else 0.75)
    assert {key: value / 3000 for key, value in shown.items()} == pytest.approx(
        dict(chances), abs=0.03
    )


def test_every_stage_of_a_small_t5(tmp_path, monkeypatch):
    """In this process, with few rows and a T5 that was hardly taught: numbers agree between
    sampler, trainer and text."""
    monkeypatch.chdir(ROOT)
    small = [
        "policy.arguments={steps=10,seed=3}",
        "data.limit=32",
        "data.arguments={split='train',count=64}",
    ]
    recipe = load(T5_PPO, [*small, "optimize.critic_warmup_steps=2", "optimize.epochs=2"])
    assert not recipe.online
    store = Store(tmp_path / "store")
    made = run_iteration(recipe, store)
    base = store.open(f"{recipe.run}/policy@0").manifest.content_hash
    again = store.open(run_here("policy", recipe.policy, store, into="again"))
    assert again.manifest.content_hash == base
    asked = {row["group_id"]: row for row in store.open(made["prompts"]).table().to_pylist()}
    for row in asked.values():
        assert row["prompt_ids"] == [3 + int(digit) for digit in row["columns"]["digits"]] + [1]
    scored = {row["rollout_id"]: row for row in store.open(made["rewards"]).table().to_pylist()}
    for row in store.open(made["rollouts"]).table().to_pylist():
        words = ["", "", "<unk>", *map(str, range(10))]  # of pad and end no text is left
        text = "".join(words[id] for id in row["completion_ids"])
        answer = asked[row["group_id"]]["columns"]["answer"]
        assert row["completion_text"] == text
        found = scored[row["rollout_id"]]
        assert found["parts"] == pytest.approx(
            {
                "in_place": t5_digits.in_place([text], [answer])[0],
                "exact_match": float(text == answer),
            }
        )
        assert found["reward"] == pytest.approx(sum(found["parts"].values()))
    policy = store.open(made["policy"])
    metrics = policy.manifest.metrics
    assert metrics["audit"]["max_gap"] < 1e-4 and (metrics["kept"], metrics["steps"]) == (32, 16)
    assert (policy.files.folder / "value_head" / "state.safetensors").is_file()
    updates = store.open(metrics["updates"]).table().to_pylist()
    assert (
        all(row["applied"] for row in updates)
        and updates[-1]["value_loss"] < updates[0]["value_loss"]
    )
