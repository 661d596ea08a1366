"""What is finished is done already to whoever asks again, in whatever words; asking starts no
process, imports nothing heavy and runs no code of a user's."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.stages.core.run.runner import Call, find_outcome
from quiver.stages.core.store import Store
from tests.finished import ALIKE, CALLS

NEWEST = {json.dumps(entry[2:]): entry for entry in [*CALLS, *ALIKE]}.values()
"""Of calls that were made twice the second one."""


@pytest.fixture(scope="module")
def store(finished, tmp_path_factory):
    """A copy; the inputs are the working directory, as they were when all was made."""
    folder = tmp_path_factory.mktemp("done") / "stores"
    shutil.copytree(finished, folder)
    before = Path.cwd()
    os.chdir(folder / "inputs")
    yield folder / "finished"
    os.chdir(before)


@pytest.mark.parametrize("entry", NEWEST, ids=lambda entry: f"{entry.stage}: {entry.name}")
def test_what_was_finished_is_done_already(store, entry):
    outcome = find_outcome(entry.on(store))
    assert outcome is not None and (outcome.ref, outcome.cached) == (entry.ref, True)


def test_another_config_is_other_work(store):
    entry = next(entry for entry in CALLS if entry.ref == "golden/rollouts@1")
    config = {**entry.config, "seed": 8}
    assert find_outcome(Call(entry.stage, config, str(store), entry.refs, entry.into)) is None


def test_the_store_is_whole(store):
    assert verify(Store(store)) == (len(list(store.rglob("v[0-9]*/manifest.json"))), [])


PLANNING = """
import json, os, subprocess, sys
started = []
def refuse(*command, **_):
    started.append(command)
    raise AssertionError("a process is started")
subprocess.Popen.__init__ = refuse
os.fork = os.posix_spawn = refuse
import quiver.stages.core.run.runner as runner
store, calls = sys.argv[1], json.load(sys.stdin)
for stage, config, refs, into, ref in calls:
    outcome = runner.find_outcome(runner.Call(stage, config, store, refs, into))
    assert (outcome and outcome.ref) == ref, (stage, config)
heavy = {"torch", "transformers", "vllm", "accelerate", "prefect"}
print(len(calls), started, sorted(heavy & set(sys.modules)))
"""


def _python(script: str, stdin: object, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", script, *arguments]
    text = json.dumps(stdin)
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_looking_for_what_is_finished_starts_nothing_and_imports_nothing_heavy(store):
    """Of every stage. Rows that a function makes have to be made to know which they are; its file
    is the user's own, and imports what it likes. For what else a user programmed see below."""
    made = [entry for entry in NEWEST if ":" not in entry.config.get("source", "")]
    calls = [
        (entry.stage, entry.on(store).config, entry.refs, entry.into, entry.ref) for entry in made
    ]
    assert _python(PLANNING, calls, str(store)) == [f"{len(calls)} [] []"]
    assert {entry.stage for entry in made} == {entry.stage for entry in CALLS}


NOTING = """
with open("ran.txt", "a") as notes:
    notes.write("x")
import torch
"""
RESOLVING = """
import json, sys
from quiver.stages.core.run.stage import load_stage
stage = load_stage("optimize")
for config in json.load(sys.stdin):
    print(stage.resolve(stage.Config(**config)).model_dump_json())
"""


def test_planning_what_a_user_programmed_does_not_run_it(store):
    """An algorithm and a base model of one's own, which import torch and note that they ran. What
    an algorithm leaves to its file is asked of it once, by `resolve`, and its key stays."""
    for name, source in (("noting_algo", "algo"), ("noting_model", "model")):
        Path(f"{name}.py").write_text(f"{Path(f'{source}.py').read_text()}\n{NOTING}")
    trained = next(entry for entry in CALLS if entry.ref == "own/policy@1")
    noting = {**trained.config, "algorithm": "noting_algo.py:ALGORITHM"}
    resolved, noting = map(json.loads, _python(RESOLVING, [trained.config, noting]))
    assert Path("ran.txt").read_text() == "x" and resolved["clip_high"] == 0.3

    calls = [
        ("optimize", resolved, trained.refs, trained.into, trained.ref),
        ("policy", {"model": "noting_model.py:make"}, {}, "b", None),
        ("optimize", noting, trained.refs, trained.into, None),
    ]
    assert _python(PLANNING, calls, str(store)) == ["3 [] []"]
    assert Path("ran.txt").read_text() == "x"
