"""`torchrun -m quiver optimize RECIPE`: each rank is a whole command, and the first one speaks."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from quiver.flows.verification import verify
from quiver.stages.core.ranks import follows_rank_0
from quiver.stages.core.store import Store
from quiver.stages.optimize.config import Config
from tests.flows.conftest import command_environment, left_behind, write_recipe
from tests.stages.optimize import world
from tests.stages.optimize.world import weights
from tests.tiny import make_policy
from tests.writing import run_here

pytestmark = pytest.mark.dist
SETTINGS = {
    "optimize.token_budget": 40,
    "optimize.learning_rate": 1e-2,
    "optimize.eps": 1.0,
    "optimize.grad_clip": 1e9,
}
"""AdamW's eps is 1, so that the step follows the gradient and not only its sign."""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A recipe, and what it trains on in its store."""
    folder = write_recipe(tmp_path / "work")
    store = Store(folder / "store")
    world.make(store, make_policy(store), world.even_share)
    return folder


def start(folder: Path, **settings) -> subprocess.Popen:
    """torchrun with two ranks of the command."""
    arguments = [f"--set={key}={setting}" for key, setting in {**SETTINGS, **settings}.items()]
    arguments += ["--rollouts", "tiny/rollouts@1", "--rewards", "tiny/rewards@1"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "quiver"]
    return subprocess.Popen(
        [sys.executable, *launcher, "optimize", "recipe.toml", "--json", *arguments],
        cwd=folder,
        env={**command_environment(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_as_one_process(store: Store) -> None:
    """That two ranks made of their inputs what one process makes of them."""
    two = store.open("tiny/policy@1")
    assert two.manifest.metrics["processes"] == 2
    refs = {entry.role: entry.ref for entry in two.manifest.inputs}
    if "ref" in refs:
        refs["ref_logprobs"] = refs.pop("ref")
    one = store.open(run_here("optimize", Config(**two.manifest.config), store, into="one", **refs))
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=0, atol=1e-6)
    start = weights(store.open("tiny/policy@0"))
    assert max(float((weights(two)[name] - start[name]).abs().max()) for name in start) > 1e-4


def test_two_ranks_make_what_one_process_makes(folder):
    """The reference's logprobs are made by the first one, and the other waits for them. Where ranks
    are, no pool is asked."""
    asked = {"optimize.kl_coef": 0.1, "placement.optimize": "nobody", "store": folder / "store"}
    running = start(folder, **asked)
    stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 0, stderr
    assert [json.loads(line)["ref"] for line in stdout.splitlines()] == ["tiny/policy@1"]
    assert stderr.count("step 0:") == 1
    store = Store(folder / "store")
    assert store.numbers("tiny", "logprobs") == [1]
    check_as_one_process(store)
    assert verify(store)[1] == []


def stage_of_rank_1(folder: Path) -> int:
    """The process that trains for the second rank: of the stage, not of the command."""
    ours = {"PREFECT_HOME": str(folder / "prefect"), "RANK": "1"}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # some have just ended
            if "quiver.stages" in process.cmdline() and ours.items() <= process.environ().items():
                return process.pid
    raise AssertionError("there is none")


def test_a_rank_that_is_killed_ends_the_other_and_the_next_launch_goes_on(folder):
    settings = {"optimize.epochs": 16, "optimize.resume_steps": 2}
    running = start(folder, **settings)
    for line in running.stderr:
        if "step 0:" in line:
            second = stage_of_rank_1(folder)
        if "step 3:" in line:
            os.kill(second, signal.SIGKILL)
            break
    stderr = running.communicate(timeout=120)[1]
    assert running.returncode == 1 and "E-RESOURCE stage optimize" in stderr, stderr
    assert "by SIGKILL" in stderr
    assert left_behind(folder) == []
    store = Store(folder / "store")
    assert store.numbers("tiny", "policy") == [0] and verify(store)[1] == []

    running = start(folder, **settings)
    stdout, stderr = running.communicate(timeout=240)
    assert running.returncode == 0 and "the training continues after step" in stderr, stderr
    assert json.loads(stdout)["ref"] == "tiny/policy@1"
    assert not list(Path(store.url).glob("tiny/policy/.work/*"))
    check_as_one_process(store)


def test_ranks_of_another_command_are_refused(monkeypatch, command, capfd):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command("reward", "recipe.toml")[0] == 2
    said = capfd.readouterr().err
    assert "E-CONFIG command line: only `quiver optimize` shares its work among" in said


def test_what_other_programs_left_in_the_environment_is_no_launch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "ACCELERATE_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    for variables in ({"RANK": "1"}, {"RANK": "", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2"}):
        with monkeypatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            assert not follows_rank_0(), variables
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert follows_rank_0()
