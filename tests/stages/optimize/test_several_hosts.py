"""Ranks of which nobody watches over all, as where each of several hosts has a launcher of its own: of
one that dies or falls silent the other learns."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.stages.optimize import world

pytestmark = pytest.mark.dist
RANK = """
import json, logging, sys
from datetime import timedelta
from quiver.stages.__main__ import answer_call, leave
from quiver.stages.core.run.runner import Call
from quiver.stages.optimize import accelerator

logging.basicConfig(level=logging.INFO)
store, config, refs, into = json.loads(sys.argv[1])
accelerator.HOST_SILENCE = timedelta(seconds=15)
answer, code = answer_call(Call("optimize", config, store, refs, into).to_json())
print(json.dumps(answer))
leave(code)
"""
"""What a stage's process does, with less patience."""


def start_ranks(store, refs, settings) -> tuple[list[subprocess.Popen], list]:
    """Both ranks, and the files that they log to."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = Path(store.url).parent
    (folder / "rank.py").write_text(RANK)
    call = json.dumps([store.url, settings.model_dump(mode="json"), refs, "two"])
    ranks, logs = [], [folder / f"rank-{rank}.log" for rank in (0, 1)]
    for rank, log in enumerate(logs):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true"}
        with log.open("w") as stderr:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(folder / "rank.py"), call],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
            )
    return ranks, logs


@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_whose_peer_is_gone_or_silent_says_so(store, policy, made, death):
    """Of a killed one connections are reset; a host without power or cable is silent."""
    refs = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref}
    refs = {role: str(ref) for role, ref in refs.items()}
    settings = world.config(token_budget=40, learning_rate=1e-2, epochs=4000)
    ranks, logs = start_ranks(store, refs, settings)
    try:
        deadline = time.monotonic() + 120
        while not any("step 3:" in log.read_text() for log in logs):
            assert time.monotonic() < deadline and not any(rank.poll() for rank in ranks)
            time.sleep(0.05)
        ranks[0].send_signal(death)
        stdout, _ = ranks[1].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    error = json.loads(stdout.splitlines()[-1])["error"]
    assert (error["code"], error["object"]) == ("E-RESOURCE", "the other ranks"), error
    assert "run the same command again" in error["next"]
    assert ranks[1].returncode == 7
    assert store.numbers("two", "policy") == []
