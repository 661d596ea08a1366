"""Slow: each recipe that learns, as a user runs it: the held-out score rises by more than two
standard errors, and by as much as the recipe promises."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.flows.conftest import command_environment, command_line

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.prefect
@pytest.mark.parametrize(
    ("name", "setting", "least"),
    [
        *(pytest.param("demo", f"seed={n}", 0.10, marks=pytest.mark.vllm) for n in (0, 1, 2)),
        ("guess", None, 0.15),
        ("squares", None, 0.10),
        ("squares", "policy.arguments.family=qwen3_vl", 0.10),
        ("tones", None, 0.10),
        ("t5_ppo", None, 0.15),
    ],
)
def test_a_recipe_gets_better(tmp_path, name, setting, least):
    recipe = f"deployments/recipes/{name}.toml"
    command = [*command_line(), "run", recipe, "--json"]
    command += ["--store", str(tmp_path / "store")]
    command += ["--set", setting] if setting else []
    env = command_environment(tmp_path)
    env.pop("OMP_NUM_THREADS", None)  # as a user has it
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    after = json.loads(done.stdout)["iterations"][-1]["evaluation"]
    before = after["baseline"]
    print(f"{name}: {before} → {after}")
    gain = after["score"] - before["score"]
    assert gain > 2 * (before["stderr"] ** 2 + after["stderr"] ** 2) ** 0.5
    assert gain >= least
    if name == "t5_ppo":
        assert 0.1 < before["score"] < 0.6, "taught, but not all of it"
