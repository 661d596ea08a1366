"""A rank dies while the checkpoint is saved, whole weights or shards: the other one ends, nothing is
published, and the next launch succeeds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from tests.stages.optimize import world
from tests.tiny import make_policy

pytestmark = [pytest.mark.dist, pytest.mark.torture]
ROOT = Path(__file__).parents[2]
POINTS = ["resume.saved@2", "checkpoint.half", "checkpoint.flushing", "commit.renaming@3"]
RANK = """
import sys
from quiver import run_stage
from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config

config = Config(device="cpu", processes=2, minibatches=2, resume_steps=1, shard="shard" in sys.argv)
refs = dict(zip(("policy", "rollouts", "rewards"), sys.argv[2:5]))
print(run_stage("optimize", config, Store(sys.argv[1]), in_process=True, into="two", **refs))
"""


def launch(store: Store, refs: list[str], failure: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "QUIVER_FAIL": failure,
    }
    script = store.path.parent / "rank.py"
    script.write_text(RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, str(script), str(store.path), *refs],
        env=environment,
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


@pytest.mark.parametrize(
    ("point", "options"),
    [
        *((point, []) for point in POINTS),
        ("resume.saved@2", ["shard"]),
        ("checkpoint.half", ["shard"]),
    ],
)
def test_a_rank_that_dies_in_the_save(store, record_property, point, options):
    policy = make_policy(store)
    rollouts, rewards = world.make(store, policy, world.even_share)
    refs = [str(version.ref) for version in (policy, rollouts, rewards)]
    done = launch(store, [*refs, *options], f"{point}:kill")
    assert done.returncode != 0 and f"Signal {signal.SIGKILL.value}" in done.stderr
    assert store.numbers("two", "policy") == []
    done = launch(store, [*refs, *options], "")
    assert done.returncode == 0, done.stderr[-3000:]
    assert store.numbers("two", "policy") == [1] and verify(store)[1] == []
    assert not list(store.path.glob("two/policy/.staging/*"))
    record_property("ranks that died", 1)
