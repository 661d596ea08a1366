"""[data] curriculum in a run: which rewards the prompts of each round are chosen by, with overlap,
with further rounds, and when a run cleans up after itself."""

import pytest

from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.schemas.errors import ConfigError
from quiver.stages.common.store import Store
from quiver.stages.common.store.collection import Rule, collect
from tests.flows.conftest import RECIPE
from tests.flows.stages_here import Stages
from tests.flows.test_refill import SETTINGS, improve, without_seconds, write

CHOSEN = (
    "data.curriculum={low=0.2,high=0.8,iterations=1}",
    "data.refill={groups=4,max_rounds=2}",
    "optimize.max_staleness=1",
    "overlap=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("chosen") / "work")


@pytest.fixture(scope="module")
def done(folder) -> list[dict]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return improve(monkeypatch, folder, *CHOSEN)


def rewards_of(store: Store, prompts: str) -> list[str]:
    return [entry.ref for entry in store.open(prompts).manifest.inputs]


def test_each_round_is_chosen_by_the_rewards_of_the_last_iterations_and_of_its_own(folder, done):
    """With overlap, too: what is sampled while another iteration trains is chosen by what that one
    measured."""
    store = Store(folder / "store")
    measured: list[list[str]] = [[]]
    for iteration in done:
        measured.append([])
        for each in iteration["rounds"]:
            assert rewards_of(store, each["prompts"]) == measured[-2] + measured[-1]
            measured[-1].append(each["rewards"])
    assert [len(refs) for refs in measured[1:]] == [2, 2]


def test_further_rounds_ask_other_rows(folder, done):
    store = Store(folder / "store")
    for iteration in done:
        groups = [
            set(store.open(each["prompts"]).table()["group_id"].to_pylist())
            for each in iteration["rounds"]
        ]
        assert not groups[0] & groups[1]


def test_by_hand_the_same_prompts_are_found(folder, done, monkeypatch):
    monkeypatch.chdir(folder)
    recipe = load("recipe.toml", [*SETTINGS, *CHOSEN])
    store = Store("store")
    each = done[1]["rounds"][0]
    references = {"rewards": rewards_of(store, each["prompts"]), "policy": "tiny/policy@0"}
    with Stages().of(recipe):
        outcome = rerun(recipe, "prompt", references, each["round"])
    assert (outcome.ref, outcome.cached) == (each["prompts"], True)


def test_what_prompts_were_chosen_by_stays_without_what_was_scored(folder, done, monkeypatch):
    """And the run goes on by it."""
    store = Store(folder / "store")
    collect(store, Rule(keep=1, moments=1, grace_seconds=0), apply=True)
    last = done[-1]["rounds"][-1]
    kept = rewards_of(store, last["prompts"])
    assert kept == ["tiny/rewards@1", "tiny/rewards@2", "tiny/rewards@3"]
    assert store.numbers("tiny", "rewards") == [1, 2, 3, 4]
    assert store.numbers("tiny", "rollouts") == [3, 4], "those that policy@2 learned from"
    assert store.numbers("tiny", "prompts") == [3, 4]
    stages = Stages()
    again = improve(monkeypatch, folder, *CHOSEN, stages=stages)
    assert stages.num_made == 0
    assert without_seconds(again) == without_seconds(done)
    further = improve(monkeypatch, folder, *CHOSEN, "iterations=3")[2]["rounds"]
    measured = [each["rewards"] for each in done[-1]["rounds"]]
    assert rewards_of(store, further[0]["prompts"]) == measured


def test_held_out_rows_are_not_chosen(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load(tmp_path / "recipe.toml", [CHOSEN[0]])
    assert recipe.prompt_config(1).curriculum.high == 0.8
    assert recipe.prompt_config(0, evaluation=True).curriculum is None
    with pytest.raises(ConfigError, match=r"data\.curriculum: low 0\.9 is above high 0\.8"):
        load(tmp_path / "recipe.toml", ["data.curriculum={low=0.9,high=0.8,iterations=1}"])
