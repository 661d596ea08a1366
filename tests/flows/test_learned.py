"""What `quiver run` says at its end of a run in which something is amiss."""

from pathlib import Path

import pytest

from quiver.flows.commands.running import run
from tests.flows.conftest import write_recipe
from tests.flows.test_cleaning import QUICK, stay_here

pytestmark = pytest.mark.prefect
SETTINGS = [*QUICK, "data.held_out=null", "reward.functions=[{use='always.py:score'}]"]


def test_a_run_that_learned_nothing_says_so_in_a_word(api, tmp_path, monkeypatch, capfd):
    """With the same reward for every answer; a healthy run says nothing of the kind."""
    stay_here(write_recipe(tmp_path), monkeypatch, [])
    path = Path("always.py")
    path.write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    run(Path("recipe.toml"), iterations=1, settings=SETTINGS)
    told = capfd.readouterr().err
    assert "warning: tiny learned nothing: in no group did one answer score better" in told
    path.write_text("def score(completions):\n    return [len(c) for c in completions]\n")
    run(Path("recipe.toml"), iterations=1, settings=[*SETTINGS, "run=healthy"])
    told = capfd.readouterr().err
    assert "healthy/policy@1" in told and "warning: healthy learned nothing" not in told
