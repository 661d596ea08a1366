"""Planning a reward stage: every scorer's fingerprint, without a process, torch or a user's code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.reward.config import Config, pinned
from tests.stages.reward.reward_models import make_model

ROOT = Path(__file__).parents[3]
COUNTING = """
import json, sys

started = []
NEW_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
sys.addaudithook(lambda event, arguments: started.append(event) if event in NEW_PROCESS else None)

from quiver.stages.reward.config import Config, pinned

config = Config.model_validate_json(sys.argv[1])
found = {scorer.name: scorer.fingerprint for scorer in pinned(config)[0].scorers}
heavy = {"torch", "transformers", "vllm", "mine"} & set(sys.modules)
print(json.dumps([found, started, sorted(heavy)]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a reward function that cannot be loaded in silence."""
    (tmp_path / "mine.py").write_text("print('this was run')\ndef f(completions): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "section", "start"),
    [
        ("functions", {"use": "numeric"}, "quiver:2"),
        ("functions", {"use": "mine.py:f"}, "sha256:"),
        ("functions", {"use": "mine:f"}, "sha256:"),
        ("models", {"model": "model"}, "sha256:"),
        ("servers", {"dialect": "quiver", "urls": ["http://127.0.0.1:9"]}, "server:"),
    ],
)
def test_planning_starts_no_process_and_imports_no_torch(folder, kind, section, start):
    if kind == "models":
        make_model(folder / "model")
    config = json.dumps({kind: [{**section, "name": "it"}]})
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, config], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, started, imported = json.loads(done.stdout)
    assert found.keys() == {"it"} and found["it"].startswith(start)
    assert (started, imported) == ([], [])


def test_a_scorer_with_another_fingerprint_is_refused(folder):
    config = Config(functions=[{"use": "mine.py:f", "name": "it"}])
    known = pinned(config)[0]
    assert known.functions[0].fingerprint.startswith("sha256:")
    assert pinned(known)[0] == known
    (folder / "mine.py").write_text("def f(completions): ...\n")
    with pytest.raises(ConfigError, match="fingerprint expected"):
        pinned(known)


def test_a_neighbour_of_a_function_counts(folder):
    (folder / "mine.py").write_text("import helper\n")
    (folder / "helper.py").write_text("1")
    config = Config(functions=[{"use": "mine.py:f"}, {"use": "mine:f", "name": "same"}])
    before = {function.fingerprint for function in pinned(config)[0].functions}
    (folder / "helper.py").write_text("2")
    after = {function.fingerprint for function in pinned(config)[0].functions}
    assert len(before) == len(after) == 1 and before != after
