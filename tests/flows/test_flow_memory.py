"""What a flow holds in memory does not grow with its rollouts: 1 GB of them are scored, and it
takes less than 50 MB more."""

import json
import subprocess
import sys

import pytest

from quiver.stages.common.store import Store
from tests.benchmarks.made import make_prompts, make_rollouts, tiny_policy
from tests.flows.conftest import RECIPE, command_environment

MEASURE = """
import json, re
from pathlib import Path
from quiver.flows.recipe import load
from quiver.flows.tasks import perform

def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

recipe = load("recipe.toml", ["run=bench", "reward.functions=[{use='length',arguments={target=100}}]"])
perform(recipe, "reward", recipe.reward, {"rollouts": "bench/rollouts@1"}, label="one")
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
done = perform(recipe, "reward", recipe.reward, {"rollouts": "bench/rollouts@2"}, label="two")
print(json.dumps({"rows": done.rows, "growth": memory("VmHWM") - before}))
"""


@pytest.mark.slow
@pytest.mark.prefect
def test_a_gigabyte_of_rollouts(tmp_path):
    store = Store(tmp_path / "store")
    policy, rows = tiny_policy(store), 400_000
    small, large = make_prompts(store, 32), make_prompts(store, rows // 8)
    make_rollouts(store, policy, 256, asked=small)
    version = make_rollouts(store, policy, rows, asked=large)
    assert version.manifest.bytes["data"] > 1e9
    (tmp_path / "recipe.toml").write_text(RECIPE)
    env = command_environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == rows
    assert found["growth"] < 50e6
