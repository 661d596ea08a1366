"""Rewards by functions of a notebook: their source is a file, and its hash decides."""

import linecache
from pathlib import Path

import pytest

import quiver
from quiver.schemas.errors import ConfigError
from quiver.stages.reward.config import Config
from tests import episodes
from tests.writing import run_here

CELL = """
import re
from math import sqrt

ROOT = 9.0
TABLE = object()

def digits(text):
    return re.findall(r"[0-9]", text)

def score(completions, **_):
    TABLE = sqrt(ROOT)
    return [float(len(digits(text))) + TABLE for text in completions]

def bad(completions, **_):
    return [TABLE for _ in completions]
"""


@pytest.fixture
def in_cell(tmp_path, monkeypatch):
    """A function that runs a cell as IPython does, and returns what it defines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(text: str) -> dict:
        name = f"<cell {len(linecache.cache)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        names = {"__name__": "__main__"}
        exec(compile(text, name, "exec"), names)
        return names

    return run


def test_a_cells_function_scores_and_an_edit_scores_anew(store, sample, in_cell):
    rollouts = sample([["1", "a 22"]], {"answer": ["1"]})

    def scored(text: str) -> tuple[str, list[float]]:
        config = quiver.reward.Config(functions=[{"use": in_cell(text)["score"], "weight": 2}])
        ref = run_here("reward", config, store, rollouts=rollouts.ref)
        return str(ref), sorted(store.open(ref).table()["reward"].to_pylist())

    first = scored(CELL)
    assert first == ("arith/rewards@1", [8.0, 10.0])
    assert scored(CELL) == first
    assert scored(CELL.replace("9.0", "16.0")) == ("arith/rewards@2", [10.0, 12.0])
    (entry,) = store.open("arith/rewards@1").manifest.config["functions"]
    text = Path(entry["use"].rpartition(":")[0]).read_text()
    assert entry["use"].endswith("/score.py:score") and "def bad" not in text


def test_what_no_file_can_hold_is_refused(in_cell):
    names = in_cell(CELL)
    for function, problem in (
        (names["bad"], "uses TABLE, a object"),
        (lambda completions: [], "def"),
    ):
        with pytest.raises((ConfigError, ValueError), match=problem):
            Config(functions=[function])


def test_a_function_of_a_module_is_named_there():
    (function,) = Config(functions=[episodes.even_ids]).functions
    assert (function.use, function.name) == (f"{episodes.__file__}:even_ids", "even_ids")
