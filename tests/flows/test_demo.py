"""The demo as a user runs it, on three seeds: the held-out score rises by more than two standard
errors and by ten points."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.conftest import command_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.prefect
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_gets_better(tmp_path, seed):
    command = [
        sys.executable,
        "-m",
        "quiver.flows.cli",
        "run",
        "deployments/recipes/demo.toml",
        "--json",
    ]
    command += ["--store", str(tmp_path / "store"), "--set", f"seed={seed}"]
    env = command_environment(tmp_path)
    env.pop("OMP_NUM_THREADS", None)  # as a user has it
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    after = result["iterations"][-1]["evaluation"]
    before = after["baseline"]
    print(f"seed {seed}: {before} → {after}")
    gain = after["score"] - before["score"]
    assert gain > 2 * (before["stderr"] ** 2 + after["stderr"] ** 2) ** 0.5
    assert gain >= 0.10
