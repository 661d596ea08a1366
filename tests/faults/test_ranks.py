"""A rank dies while the checkpoint is saved, whole weights or shards: the other one ends, nothing is
published, and the next launch succeeds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.stages.core.store import Store
from tests.faults.failing import environment
from tests.stages.optimize import world
from tests.tiny import make_policy

pytestmark = [pytest.mark.dist, pytest.mark.torture]
ROOT = Path(__file__).parents[2]
PLACES = ["resume.saved@2", "checkpoint.half", "checkpoint.flushing", "commit.renaming@3"]
RANK = """
import sys
from quiver import run_stage
from quiver.stages.core.store import Store
from quiver.stages.optimize.stage import Config

config = Config(device="cpu", processes=2, minibatches=2, resume_steps=1, shard="shard" in sys.argv)
refs = dict(zip(("policy", "rollouts", "rewards"), sys.argv[2:5]))
print(run_stage("optimize", config, Store(sys.argv[1]), in_process=True, into="two", **refs))
"""


def launch(store: Store, refs: list[str], **variables: str) -> subprocess.CompletedProcess:
    script = Path(store.url).parent / "rank.py"
    script.write_text(RANK)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [sys.executable, *launcher, str(script), store.url, *refs],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


@pytest.mark.parametrize(
    ("place", "options"),
    [
        *((place, []) for place in PLACES),
        ("resume.saved@2", ["shard"]),
        ("checkpoint.half", ["shard"]),
    ],
)
def test_a_rank_that_dies_in_the_save(store, monkeypatch, record_property, place, options):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    policy = make_policy(store)
    rollouts, rewards = world.make(store, policy, world.even_share)
    refs = [str(version.ref) for version in (policy, rollouts, rewards)]
    done = launch(store, [*refs, *options], **environment(f"{place}:kill"))
    assert done.returncode != 0 and f"Signal {signal.SIGKILL.value}" in done.stderr
    assert store.numbers("two", "policy") == []
    done = launch(store, [*refs, *options])
    assert done.returncode == 0, done.stderr[-3000:]
    assert store.numbers("two", "policy") == [1] and verify(store)[1] == []
    assert not list(Path(store.url).glob("two/policy/.work/*"))
    record_property("ranks that died", 1)
