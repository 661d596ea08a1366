"""Evaluations in the recipe's trackers: each once, whenever the run came to an end."""

import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quiver.flows.evaluation import track_evaluation
from quiver.flows.recipe import load
from quiver.stages.common.store import Store
from tests.flows.conftest import write_recipe
from tests.flows.test_cleaning import stay_here

REF = "held/evaluations@1"


@pytest.fixture
def recipe(finished, tmp_path, monkeypatch):
    stay_here(write_recipe(tmp_path), monkeypatch, [])
    shutil.copytree(finished / "finished", "finished")
    return load(
        "recipe.toml",
        [
            "store=finished",
            "optimize.trackers=['tensorboard']",
            "optimize.tracker_folder=logs",
        ],
    )


def scores() -> list[float]:
    """Of all files: each process that tracks writes one."""
    events = EventAccumulator("logs/held").Reload()
    if "evaluation/score" not in events.Tags()["scalars"]:
        return []
    return [point.value for point in events.Scalars("evaluation/score")]


def test_an_evaluation_is_tracked_once(recipe):
    """A run that ended between the two is made good by the next."""
    score = Store("finished").open(REF).manifest.metrics["score"]
    for _ in range(2):
        track_evaluation(recipe.optimize, "finished", REF)
        assert scores() == [pytest.approx(score, abs=1e-6)]


def test_what_could_not_be_told_is_told_the_next_time(recipe, caplog):
    Path("logs").write_text("in the way")
    with caplog.at_level("WARNING", logger="quiver"):
        track_evaluation(recipe.optimize, "finished", REF)
    assert "evaluations@1 is not in tensorboard: optimize.trackers tensorboard" in caplog.text
    Path("logs").unlink()
    track_evaluation(recipe.optimize, "finished", REF)
    assert len(scores()) == 1
