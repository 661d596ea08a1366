"""Ranks that a launcher brought together and that would not train the same thing all refuse."""

import json
import os
import subprocess
import sys

import pytest

from tests.stages.optimize import world
from tests.tiny import make_policy

pytestmark = pytest.mark.dist
SCRIPT = """
import json, os, sys
from quiver import run_stage
from quiver.schemas.errors import QuiverError
from quiver.stages.optimize import resume

store, config, refs, changed, blind = json.loads(sys.argv[1])
rank = os.environ["RANK"]
if rank == "1":
    config |= changed
    if blind:
        def read(self, trainer):
            raise FileNotFoundError
        resume.SavedProgress._read = read
try:
    run_stage("optimize", config, store, in_process=True, **refs)
except QuiverError as error:
    with open(f"{store}/../told-{rank}", "w") as told:
        told.write(str(error))
    os._exit(0)
"""


@pytest.fixture
def refs(store) -> dict[str, str]:
    policy = make_policy(store)
    rollouts, rewards = world.make(store, policy, world.even_share)
    return {"policy": str(policy.ref), "rollouts": str(rollouts.ref), "rewards": str(rewards.ref)}


def told(store, refs, settings, *, changed=(), blind=False) -> list[str]:
    """What two ranks were told, of which the second has `changed` in its config, or is blind to the
    saved progress."""
    script = store.path.parent / "script.py"
    script.write_text(SCRIPT)
    given = settings.model_dump(mode="json")
    asked = json.dumps([str(store.path), given, refs, dict(changed), blind])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), asked],
        env=env,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    paths = [store.path.parent / f"told-{rank}" for rank in (0, 1)]
    assert all(path.exists() for path in paths), done.stderr[-3000:]
    return [path.read_text() for path in paths]


def test_other_settings_on_one_rank(store, refs):
    settings = world.config(token_budget=40)
    first, second = told(store, refs, settings, changed={"learning_rate": 0.5})
    assert first == second
    assert "E-CONFIG optimize: the ranks do not train the same thing: run_key of rank 0" in first
    assert store.numbers("tiny", "policy") == [0]


def test_saved_progress_that_one_rank_does_not_see(store, refs, monkeypatch):
    settings = world.config(token_budget=40, epochs=3, resume_steps=1)
    interrupted(store, refs, settings)
    first, second = told(store, refs, settings, blind=True)
    assert first == second
    assert "E-CONFIG optimize: the ranks would go on after different steps" in first
    assert store.numbers("tiny", "policy") == [0]


def interrupted(store, refs, settings) -> None:
    """A training that ended after its first steps were saved."""
    script = (
        "import json, os, sys; from quiver import run_stage; "
        "from quiver.stages.optimize import results; "
        "results.save = lambda *_: os._exit(9); "
        "store, config, refs = json.loads(sys.argv[1]); "
        "run_stage('optimize', config, store, in_process=True, **refs)"
    )
    asked = json.dumps([str(store.path), settings.model_dump(mode="json"), refs])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([sys.executable, "-c", script, asked], env=env, check=False)
    assert done.returncode == 9
