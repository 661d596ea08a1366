"""`quiver bisect`: policies whose templates decide what the scripted engine echoes."""

import shutil

import pytest

from quiver.flows.bisection import bisect
from quiver.flows.calls import by_hand
from quiver.flows.evaluation import measure
from quiver.flows.look.comparisons import bisection_lines
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.schemas.errors import LineageError
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, marks
from quiver.stages.core.store.listing import EXPIRED
from tests.flows.conftest import stay_here
from tests.stages.core.store.test_store import Settings
from tests.tiny import make_policy
from tests.writing import begin, write_lines

RECIPE = """
run = "line"
store = "store"
[policy]
model = "unused"
[data]
source = "questions.jsonl"
prompt = "question"
held_out = { source = "held_out.jsonl" }
[generate]
engine = "scripted"
options = { script = "echo" }
samples_per_prompt = 2
sampling = { max_tokens = 64 }
[reward]
workers = 1
functions = [{ use = "rewards.py:score" }]
"""
REWARD = """
def score(completions, number, **_):
    return [float("worse" not in text or n == 0) for text, n in zip(completions, number)]
"""
FIRST_WORSE = 5


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """The recipe of line/policy@0 to policy@8. From policy@5 on, all answers but one are worse."""
    tmp_path = tmp_path_factory.mktemp("line")
    rows = [{"question": f"What is {number}?", "number": number} for number in range(8)]
    write_lines(tmp_path / "held_out.jsonl", rows)
    (tmp_path / "questions.jsonl").write_text('{"question": "What?", "number": 1}')
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    store = Store(tmp_path / "store")
    first = parent = make_policy(store, "line")
    for number in range(1, 9):
        about = {"stage_version": 1, "config": Settings(seed=number)}
        with begin(
            store, "line", "policy", stage="optimize", inputs={"policy": parent}, **about
        ) as work:
            for name in first.files.names:
                content = first.files.read(name)
                if name.startswith("chat_template"):
                    word = b"worse" if number >= FIRST_WORSE else b"assistant"
                    content = content.replace(b"assistant", word) + b"{# %d #}" % number
                (work.folder / name).write_bytes(content)
            parent = work.commit()
    return tmp_path


@pytest.fixture
def workplace(original, tmp_path, monkeypatch):
    """A copy of the recipe and its store, and the list of stages that were run."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    stages = []
    stay_here(tmp_path, monkeypatch, stages)
    return load(tmp_path / "recipe.toml"), stages


def search(recipe, good, bad):
    with by_hand(recipe):
        return bisect(recipe, f"line/policy@{good}", f"policy@{bad}")


def test_what_was_measured_against_another_baseline_is_not_sampled_again(workplace):
    """As by a sweep or a night: only the last stage, which compares, is another one."""
    recipe, stages = workplace
    with by_hand(recipe):
        judge = recipe.held_out_resolved()
        baseline = measure(judge, "line/policy@0", 0).ref
        with_baseline = measure(judge, "line/policy@1", 1, baseline=baseline)
        assert "difference" in with_baseline.metrics
        stages.clear()
        alone = rerun(recipe, "evaluate", {"policy": "line/policy@1"})
    assert stages == ["evaluate"] and alone.metrics["score"] == with_baseline.metrics["score"]


def test_the_first_worse_policy_is_found_with_few_measurements(workplace):
    recipe, stages = workplace
    answer = search(recipe, 0, 8)
    assert (answer["first"], answer["before"]) == ("line/policy@5", "line/policy@4")
    measured = [(step["policy"], step["is_worse"]) for step in answer["steps"]]
    assert measured == [
        ("line/policy@8", True),
        ("line/policy@4", False),
        ("line/policy@6", True),
        ("line/policy@5", True),
    ]
    bad = answer["steps"][0]
    assert (bad["a"]["score"], bad["b"]["score"]) == (1.0, 1 / 8)
    assert answer["last_step"]["difference"]["score"]["score"] == -7 / 8
    lines = bisection_lines(answer)
    assert "first worse: line/policy@5" in lines and lines[-2].startswith("Sure")
    assert stages.count("generate") == 5
    stages.clear()
    assert search(recipe, 0, 8) == answer and stages == []
    with pytest.raises(LineageError, match="not told apart"):
        search(recipe, 0, 4)
    # what expired is left out
    marks.write(Store(recipe.store).storage, Ref("line", "policy", 4), EXPIRED, "gc")
    answer = search(recipe, 0, 8)
    assert answer["gone"] == ["line/policy@4"]
    assert (answer["first"], answer["before"]) == ("line/policy@5", "line/policy@3")


def test_a_bad_policy_that_is_better_is_called_so(workplace, tmp_path):
    recipe, _ = workplace
    (tmp_path / "rewards.py").write_text(REWARD.replace("not in", "in"))
    with pytest.raises(LineageError, match="the second is better"):
        search(recipe, 0, 8)


def test_a_bad_policy_must_descend_from_the_good_one(workplace):
    recipe, stages = workplace
    for good, bad in ((8, 0), (3, 3)):
        with pytest.raises(LineageError, match="does not descend"):
            search(recipe, good, bad)
    assert stages == []
