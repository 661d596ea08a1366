"""Rewards by functions of a notebook: their source is a file, and its hash decides."""

import importlib
import json
import linecache
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import quiver
from quiver.schemas.errors import ConfigError
from quiver.stages.core.from_cell import as_file
from quiver.stages.core.plugins import load
from quiver.stages.core.run import runner
from quiver.stages.core.run.call import Call
from quiver.stages.core.run.runner import find_or_make
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


@pytest.mark.parametrize("in_process", [True, False])
def test_a_dict_may_hold_what_a_config_may(store, sample, in_cell, monkeypatch, in_process):
    """A function, and a path; what JSON cannot hold is refused."""
    monkeypatch.setattr(runner, "run_call", lambda call: find_or_make(Call(**json_copy(call))))
    rollouts = sample([["1", "a 22"]], {"answer": ["1"]}).ref
    entry = {"use": in_cell(CELL)["score"], "arguments": {"place": Path("x")}}

    def scored(config) -> str:
        how = {"rollouts": rollouts, "in_process": in_process}
        return str(quiver.run_stage("reward", config, store, **how))

    assert scored({"functions": [entry]}) == "arith/rewards@1"
    assert scored(Config(functions=[entry])) == "arith/rewards@1"
    for config in ({"functions": [entry | {"arguments": {"by": print}}]}, {"surplus": 1}):
        with pytest.raises(ConfigError, match="stage reward"):
            scored(config)


def json_copy(call: Call) -> dict:
    """The fields of a call, as another process reads them."""
    return json.loads(json.dumps(call.to_json())) | {"where": call.where}


def test_what_no_file_can_hold_is_refused(in_cell):
    names = in_cell(CELL)
    for function, problem in (
        (names["bad"], "uses TABLE, a object"),
        (lambda completions: [], "def"),
    ):
        with pytest.raises((ConfigError, ValueError), match=problem):
            Config(functions=[function])


USES = """
import collections.abc
from collections import Counter
from collections.abc import Sequence
import functools

LIMIT = 3
COUNT = Counter("aab")
ENDLESS = float("inf")
text = object()

def helper(text):
    return text.strip()

norm = helper

def score(completions: Sequence[text], k=LIMIT, **_):
    is_list = isinstance(completions, collections.abc.Sequence)
    return [float(len(norm(text)) + k + is_list) for text in completions]

def made(limit):
    def inner(text):
        return len(text) > limit
    return inner

short, long = made(3), made(5)
limit = 7
inner = made(limit)

def both(completions, **_):
    return [short(text) + long(text) for text in completions]

def mixed(completions, **_):
    return [limit * inner(text) for text in completions]

def other(completions, **_):
    return [limit * norm(text) * short(text) for text in completions]

def counted(completions, **_):
    return [COUNT[text] for text in completions]

def endless(completions, **_):
    return [ENDLESS for text in completions]

def with_wrapper(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper

@with_wrapper
def wrapped(completions, **_):
    return [0.0 for _ in completions]
"""


def test_a_file_of_a_cell_works_in_another_process(in_cell):
    """With annotations, defaults, an alias, and a submodule; local names are no globals."""
    path, _, name = as_file(in_cell(USES)["score"]).rpartition(":")
    program = f"import runpy; print(runpy.run_path({path!r})[{name!r}]([' ab ', '']))"
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert printed.strip() == "[6.0, 4.0]"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("both", "two values of inner"),
        ("other", "two values of limit"),
        ("counted", "uses COUNT, a Counter"),
        ("endless", "uses ENDLESS, a float"),
        ("wrapped", "has a decorator"),
    ],
)
def test_a_cell_whose_file_would_score_otherwise_is_refused(in_cell, name, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        as_file(in_cell(USES)[name])
    assert "write the function into a file" in str(caught.value)


@pytest.mark.parametrize("used", ["norm(text)", "my_helpers.norm(text)", "my_helpers.deep.LOW"])
def test_an_edited_module_that_a_cell_imports_scores_anew(in_cell, tmp_path, monkeypatch, used):
    """So does one that it imports from beside it; installed ones do not count."""
    monkeypatch.syspath_prepend(tmp_path)
    cell = f"""
import json, pyarrow
import my_helpers, my_helpers.deep
from my_helpers import norm

def score(completions, **_):
    return [{used}, json, pyarrow.array]
"""
    package = tmp_path / "my_helpers"
    package.mkdir()
    (package / "__init__.py").write_text("from .deep import LOW\n\ndef norm(text): return LOW\n")
    (package / "deep.py").write_text("LOW = 1\n")
    score = in_cell(cell)["score"]
    try:
        first, again = as_file(score), as_file(score)
        (package / "deep.py").write_text("LOW = 2\n")
        assert first == again != as_file(score)
    finally:
        for name in ("my_helpers", "my_helpers.deep"):
            del sys.modules[name]
    lines = Path(first.rpartition(":")[0]).read_text().splitlines()
    assert "import json as json" in lines and "import pyarrow as pyarrow" in lines


UNDERSCORES = """
__weight = 2.0
__version__ = 3.0

def __norm(text):
    return text.strip()

def score(completions, **_):
    added = __version__ + (__name__ == "score")
    return [__weight * len(__norm(text)) + added for text in completions]

def early():
    def unset(completions, **_):
        return [later for _ in completions]
    try:
        return as_file(unset)
    finally:
        later = 1.0
"""


CHANGING = """
from functools import partial
limit = 5
def score(completions, most=limit, *, more=(limit, [1.0]), **_):
    return [float(len(text) <= most + more[0]) for text in completions]

def helper(text, most=limit):
    return len(text) <= most

def through_helper(completions, **_):
    return [helper(text) for text in completions]

def helping(completions, help=helper, **_):
    return [help(text) for text in completions]

def loose(completions, key=lambda text: len(text) - limit, **_):
    return [key(text) for text in completions]

def edges(completions, least=float("-inf"), **_):
    return [float(least < len(text)) for text in completions]

each = []
for limit in (1, 2):
    def one(completions, limit=limit, **_):
        return [float(len(text) <= limit) for text in completions]
    each.append(one)

def make(limit):
    def enclosed(completions, most=limit, **_):
        return [float(len(text) <= most) for text in completions]
    return enclosed

enclosed = make(3)

if True:
    def indented(completions, **_):
        '''Compare.

        With text of several lines.'''
        wanted = '''a
        b'''
        return [float(text == wanted) for text in completions]

def annotated(completions: list[str], **_) -> list[float]:
    def inner(text: str) -> float:
        return float(len(text))
    return [*map(inner, completions)]

def with_class(completions, **_):
    class Length(float):
        pass
    return [Length(len(text)) for text in completions]

def harmless(completions, by=(helper, partial(int, base=2)), nan=float("nan"), **_):
    return [by[1](str(int(by[0](text)))) for text in completions]
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("score", "its default of most may be another one in a file"),
        ("through_helper", "function helper: its default of most"),
        ("first", "its default of limit"),
        ("enclosed", "its default of most"),
    ],
)
def test_a_default_that_a_file_would_change_is_refused(in_cell, name, problem):
    names = in_cell(CHANGING)
    names["first"] = names["each"][0]
    with pytest.raises(ConfigError, match=problem):
        as_file(names[name])
    names["limit"] = 5
    assert as_file(names["score"])


@pytest.mark.parametrize(
    "name", ["indented", "annotated", "one", "edges", "helping", "loose", "with_class", "harmless"]
)
def test_a_file_scores_as_the_cell_does(in_cell, name):
    """With texts of several lines, annotations, and defaults that have kept their value."""
    names = in_cell(CHANGING)
    names["limit"] = 5 if name in ("helping", "harmless") else 2
    texts = ["a\n        b", "a\nb", "a"]
    path, _, _ = as_file(names[name]).rpartition(":")
    assert runpy.run_path(path)[name](texts) == names[name](texts)


def test_a_source_that_is_edited_after_it_ran_is_refused(in_cell):
    names = in_cell(CELL)
    lines = linecache.cache[names["digits"].__code__.co_filename][2]
    at = next(at for at, line in enumerate(lines) if "[0-9]" in line)
    lines[at] = lines[at].replace("[0-9]", "[1-9]")
    with pytest.raises(ConfigError, match="function digits: its source differs from what runs"):
        as_file(names["score"])


def test_names_with_two_underscores_are_kept(in_cell):
    path, _, name = as_file(in_cell(UNDERSCORES)["score"]).rpartition(":")
    assert runpy.run_path(path, run_name="score")[name]([" a "]) == [6.0]


def test_a_name_without_a_value_yet_is_refused(in_cell):
    names = in_cell(UNDERSCORES)
    names["as_file"] = as_file
    with pytest.raises(ConfigError, match="uses later, which has no value yet"):
        names["early"]()


def test_equal_values_of_one_name_are_one(in_cell):
    assert as_file(in_cell(USES)["mixed"])


def test_a_function_of_a_module_is_named_there():
    (function,) = Config(functions=[episodes.even_ids]).functions
    assert (function.use, function.name) == (f"{episodes.__file__}:even_ids", "even_ids")


def test_a_function_whose_module_was_loaded_once_more_stays_in_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "reloaded_rewards.py"
    path.write_text("import re\nNUM = re.compile('x')\ndef score(completions, **_): return [NUM]\n")
    module = importlib.import_module("reloaded_rewards")
    before = module.score
    importlib.reload(module)
    assert before is not module.score and as_file(before) == f"{path}:score"


def test_a_function_that_needs_its_package_is_named_by_its_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in {
        "shared": "WORTH = 3.0\n",
        "rewards/alone": "def score(completions, **_): return [1.0 for _ in completions]\n",
        "rewards/within": "from ..shared import WORTH\nfrom .alone import score as alone\n"
        "def score(completions, **_): return [WORTH * one for one in alone(completions)]\n",
        "rewards/beside": "from .within import score as within\n"
        "def score(completions, **_): return within(completions)\n",
    }.items():
        file = tmp_path / f"my_package/{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for name, named in (
        ("alone", f"{tmp_path}/my_package/rewards/alone.py:score"),
        ("within", "my_package.rewards.within:score"),
        ("beside", "my_package.rewards.beside:score"),
    ):
        function = importlib.import_module(f"my_package.rewards.{name}").score
        assert as_file(function) == named
        assert load(named, "field")[0](["a"]) == function(["a"])


DECORATED = """
import functools

def doubled(function):
    @functools.wraps(function)
    def inner(completions, **_):
        return [2 * reward for reward in function(completions)]
    return inner

@doubled
def score(completions, **_):
    return [1.0 for _ in completions]
"""


def test_the_function_below_a_decorator_is_not_the_decorated_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_decorated.py").write_text(DECORATED)
    try:
        module = importlib.import_module("my_decorated")
        assert as_file(module.score) == f"{module.__file__}:score"
        with pytest.raises(ConfigError, match="has a decorator"):
            as_file(module.score.__wrapped__)
    finally:
        del sys.modules["my_decorated"]
