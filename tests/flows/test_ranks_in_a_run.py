"""A recipe with `optimize.processes = 2`, run by `quiver run` and nothing else: a rank is killed, the
run ends with a typed error and leaves nobody; run again, it goes on, and two ranks end where one
does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from quiver.stages.optimize.config import Config
from tests.flows.conftest import command_environment, left_behind, quiver, write_recipe
from tests.stages.optimize.world import weights
from tests.writing import run_here

pytestmark = pytest.mark.dist
SETTINGS = {
    "iterations": 1,
    "data.held_out": "null",
    "optimize.processes": 2,
    "optimize.epochs": 40,
    "optimize.eps": 1.0,
    "optimize.grad_clip": 1e9,
    "optimize.token_budget": 100,
    "optimize.resume_steps": 2,
    "optimize.learning_rate": 1e-2,
    "placement.retries": 0,
}
"""AdamW's eps is 1, so that the step follows the gradient and not only its sign."""


def rank_of(folder: Path, rank: int) -> int:
    """The process that is this rank of a run in `folder`."""
    marks = {f"PREFECT_HOME={folder / 'prefect'}".encode(), f"RANK={rank}".encode()}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marks <= set((process / "environ").read_bytes().split(b"\0")):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"no rank {rank}")


def test_a_rank_is_killed_and_the_run_goes_on_to_what_one_process_makes(tmp_path):
    folder = write_recipe(tmp_path / "work")
    arguments = ["run", "recipe.toml"]
    for key, setting in SETTINGS.items():
        arguments += ["--set", f"{key}={setting}"]
    running = subprocess.Popen(
        [sys.executable, "-m", "quiver.flows.cli", *arguments, "--json"],
        cwd=folder,
        env=command_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    for line in running.stderr:
        lines.append(line)
        if "step 3:" in line:
            os.kill(rank_of(folder, 1), signal.SIGKILL)
            break
    stdout, stderr = running.communicate(timeout=120)
    error = json.loads(stdout)["error"]
    assert (running.returncode, error["code"]) == (7, "E-RESOURCE"), "".join(lines) + stderr
    assert "rank 1 of 2 was ended by SIGKILL" in error["message"]
    assert left_behind(folder) == []
    store = Store(folder / "store")
    assert store.numbers("tiny", "policy") == [0] and verify(store)[1] == []

    assert quiver(folder, *arguments)["iterations"][0]["policy"] == "tiny/policy@1"
    two = store.open("tiny/policy@1")
    assert two.manifest.metrics["processes"] == 2
    assert not list(store.path.glob("tiny/policy/.staging/*"))
    config = Config(**{**two.manifest.config, "processes": 1})
    refs = {entry.role: entry.ref for entry in two.manifest.inputs}
    one = store.open(run_here("optimize", config, store, into="one", **refs))
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, rtol=0, atol=1e-6)
    moved = weights(store.open("tiny/policy@0"))
    assert max(float((weights(two)[name] - moved[name]).abs().max()) for name in moved) > 1e-4
