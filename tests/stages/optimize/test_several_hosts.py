"""Ranks that torchrun started on two hosts, which are network namespaces of this one: what they make
is what one process makes, and of a host that dies the other learns."""

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
from safetensors.torch import load_file

from quiver import run_stage
from tests.stages.optimize import world
from tests.stages.optimize.hosts import two_hosts
from tests.tiny import make_policy

pytestmark = pytest.mark.dist
RANK = """
import json, logging, os, sys
from datetime import timedelta
from quiver.stages.__main__ import answer_call, leave
from quiver.stages.common.runtime.runner import Call
from quiver.stages.optimize import accelerator

logging.basicConfig(level=logging.INFO)
store, config, refs, into = json.loads(sys.argv[1])
accelerator.HOST_SILENCE = timedelta(seconds=15)
answer, code = answer_call(Call("optimize", config, store, refs, into).to_json())
print(json.dumps(answer))
leave(code)
"""
"""What a stage's process does, with less patience."""


@pytest.fixture
def refs(store) -> dict[str, str]:
    policy = make_policy(store)
    rollouts, rewards = world.make(store, policy, world.even_share)
    return {"policy": str(policy.ref), "rollouts": str(rollouts.ref), "rewards": str(rewards.ref)}


def config(**changed):
    """AdamW's eps is 1, so that the step follows the gradient and not only its sign."""
    return world.config(**{"token_budget": 40, "learning_rate": 1e-2, "eps": 1.0, **changed})


def rank_command(store, refs, settings) -> list[str]:
    """The arguments of Python for a rank, which is a script in the store's folder."""
    script = store.path.parent / "rank.py"
    script.write_text(RANK)
    asked = [str(store.path), settings.model_dump(mode="json"), refs, "two"]
    return [str(script), json.dumps(asked)]


def environment(**variables) -> dict[str, str]:
    return {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **variables}


def start(host, hosts, store, refs, settings):
    """torchrun on one host, with one rank."""
    meeting = f"--nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d --local-addr={host.address}"
    meeting += f" --rdzv-endpoint={hosts[0].address}:29400"
    # both have this host's name, by which torchrun tells where the meeting place is
    meeting += f" --rdzv-conf=is_host={host is hosts[0]}"
    command = [sys.executable, "-m", "torch.distributed.run", *meeting.split()]
    command += rank_command(store, refs, settings)
    return host.start(command, environment(GLOO_SOCKET_IFNAME="cable"), log_of(host, store))


def log_of(host, store) -> Path:
    return store.path.parent / f"{host.name}.log"


def answered(process, seconds: float = 120) -> dict:
    """What it printed last, an outcome or an error; empty where it was ended before that."""
    stdout, _ = process.communicate(timeout=seconds)
    return json.loads(stdout.splitlines()[-1]) if stdout.strip() else {}


def await_step(logs: list[Path], running, number: int) -> None:
    """Of training; only the first rank tells of it."""
    deadline = time.monotonic() + 120
    while not any(f"step {number}:" in path.read_text() for path in logs):
        assert time.monotonic() < deadline and not any(process.poll() for process in running)
        time.sleep(0.05)


def largest_gap(store, one: str, two: str) -> float:
    first, second = (
        load_file(store.open(ref).files.path("model.safetensors")) for ref in (one, two)
    )
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_two_hosts_make_what_one_process_makes(store, refs, shard):
    one = run_stage("optimize", config(epochs=4), store, into="one", in_process=True, **refs)
    with two_hosts() as hosts:
        settings = config(epochs=4, shard=shard)
        running = [start(host, hosts, store, refs, settings) for host in hosts]
        assert [answered(process)["ref"] for process in running] == ["two/policy@1"] * 2
    assert store.open("two/policy@1").manifest.metrics["processes"] == 2
    start_gap = largest_gap(store, str(one), "tiny/policy@0")
    assert largest_gap(store, str(one), "two/policy@1") < 1e-5 < start_gap


@pytest.mark.slow
@pytest.mark.parametrize("dying", [0, 1], ids=["meeting place", "other"])
@pytest.mark.parametrize("death", ["kill", "unplug"])
def test_of_a_host_that_dies_the_other_learns(store, refs, dying, death):
    """Killed, its connections are reset; without power or cable nobody is told, and where the meeting
    place was there, torchrun stays for minutes. If it is killed torchrun may notice first, and ends
    its rank."""
    with two_hosts() as hosts:
        settings = config(epochs=4000)
        running = [start(host, hosts, store, refs, settings) for host in hosts]
        await_step([log_of(host, store) for host in hosts], running, 3)
        getattr(hosts[dying], death)()
        line = running[1 - dying].stdout.readline()
    if dying == 1 or death == "unplug" or line:
        error = json.loads(line)["error"]
        assert (error["code"], error["object"]) == ("E-RESOURCE", "the other ranks"), error
    assert store.numbers("two", "policy") == []


def test_a_rank_whose_peer_was_killed_says_so(store, refs):
    """Here nobody watches over both, as where hosts have a launcher each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = config(epochs=4000)
    ranks = []
    logs = [store.path.parent / f"rank-{rank}.log" for rank in (0, 1)]
    for rank, log in enumerate(logs):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        variables["GLOO_SOCKET_IFNAME"] = "lo"
        command = [sys.executable, *rank_command(store, refs, settings)]
        with log.open("w") as stderr:
            started = subprocess.Popen(
                command,
                env=environment(**variables),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        ranks.append(started)
    try:
        await_step(logs, ranks, 3)
        ranks[0].send_signal(signal.SIGKILL)
        error = answered(ranks[1])["error"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert (error["code"], error["object"]) == ("E-RESOURCE", "the other ranks"), error
    assert "run the same command again" in error["next"]
    assert ranks[1].returncode == 7
    assert store.numbers("two", "policy") == []
