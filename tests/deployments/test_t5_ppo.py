"""The recipe t5_ppo: its rows, its reward, its base model; a small run of every stage."""

import random
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from quiver.deployments.recipes import t5_digits
from quiver.flows.recipe import load
from quiver.stages.common.store import Store
from tests.writing import run_here, run_iteration

ROOT = Path(__file__).parents[2]
RECIPE = "deployments/recipes/t5_ppo.toml"


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


def test_every_stage_of_a_small_run(tmp_path, monkeypatch):
    """In this process, with few rows and a T5 that was hardly taught: numbers agree between
    sampler, trainer and text."""
    monkeypatch.chdir(ROOT)
    small = [
        "policy.arguments={steps=10,seed=3}",
        "data.limit=32",
        "data.arguments={split='train',count=64}",
    ]
    recipe = load(RECIPE, [*small, "optimize.critic_warmup_steps=2"])
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
    assert metrics["audit"]["max_gap"] < 1e-4 and (metrics["kept"], metrics["steps"]) == (32, 32)
    assert (policy.files.folder / "value_head" / "state.safetensors").is_file()
    updates = store.open(metrics["updates"]).table().to_pylist()
    assert (
        all(row["applied"] for row in updates)
        and updates[-1]["value_loss"] < updates[0]["value_loss"]
    )
