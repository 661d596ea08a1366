"""What a schedule does with a recipe, each time: more iterations, a run of its own, or nothing.

The stages are the real ones, in this process instead of children of it.
"""

from datetime import datetime

import pytest

from quiver.flows.recipe import load
from quiver.flows.scheduled import NOTHING_LEFT, recipe_for, scheduled
from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from tests.flows.conftest import QUICK, stay_here, write_recipe

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("api")]
DUE = datetime(2026, 11, 25, 2)


@pytest.fixture
def made(tmp_path, monkeypatch) -> list[str]:
    """Stages that are run, not found; in a folder of their own."""
    stages = []
    stay_here(write_recipe(tmp_path), monkeypatch, stages)
    return stages


def recipe(*settings: str):
    return load("recipe.toml", [*QUICK, "data.held_out=null", *settings])


def policies() -> list[int]:
    return Store("store").numbers("tiny", "policy")


def iterations_of(answer: dict) -> list[int]:
    return [iteration["iteration"] for iteration in answer["iterations"]]


def test_it_goes_on_from_what_is_finished(made):
    answer = scheduled(recipe("iterations=1"))
    assert (iterations_of(answer), policies()) == ([1], [0, 1])
    answer = scheduled(recipe("iterations=2"))
    assert (iterations_of(answer), policies()) == ([1, 2, 3], [0, 1, 2, 3])
    assert made.count("optimize") == 3


def test_what_is_finished_is_counted_by_looking_alone(made):
    """An iteration counts by its policy; another recipe has finished nothing, whatever the run's
    other policies are."""
    assert recipe_for(recipe("iterations=1"), DUE).iterations == 1
    assert (made, Store("store").numbers("tiny", "prompts")) == ([], [])
    stale = "optimize.max_staleness=1"
    scheduled(recipe("iterations=2", "schedule.each='same'", stale))
    num_made = len(made)
    for settings, count in (((), 2), (("overlap=1",), 1), (("seed=8",), 0)):
        assert recipe_for(recipe("iterations=1", stale, *settings), DUE).iterations == 1 + count
    assert len(made) == num_made


def test_a_run_in_which_nothing_is_left_says_so(made):
    same = recipe("iterations=1", "schedule.each='same'")
    assert scheduled(same, return_state=True).name == "Completed"
    state = scheduled(same, return_state=True)
    assert (state.name, state.is_completed()) == (NOTHING_LEFT, True)
    assert iterations_of(state.result()) == [1] and made.count("optimize") == 1


def test_again_is_a_run_of_its_own_with_the_next_seed(made):
    again = recipe("iterations=1", "schedule.each='again'")
    first = recipe_for(again, DUE)
    assert (first.run, first.seed) == ("tiny-2026-11-25-0200", again.seed + 1)
    scheduled(again)
    second = recipe_for(again, datetime(2999, 1, 1))
    assert (second.run, second.seed) == ("tiny-2999-01-01-0000", again.seed + 2)
    [run] = [name for name in Store("store").runs() if name.startswith("tiny-")]
    assert Store("store").numbers(run, "policy") == [0, 1]
    at = datetime.strptime(run.removeprefix("tiny-"), "%Y-%m-%d-%H%M")
    restarted = recipe_for(again, at)
    assert (restarted.run, restarted.seed) == (run, first.seed), "it does not count itself"


def test_a_name_that_would_get_too_long_is_told(made):
    with pytest.raises(ConfigError, match="'again', which makes runs like t"):
        recipe_for(recipe(f"run={'t' * 50}", "schedule.each='again'"), DUE)
