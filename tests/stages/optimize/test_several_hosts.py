"""Ranks on two hosts, which are network namespaces of this one: what they make is what one process
makes, and of a host that dies the other learns."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from safetensors.torch import load_file

from quiver import run_stage
from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.common import ranks
from quiver.stages.common.rendezvous import Watch, address_towards, ranks_a_host, several_hosts
from quiver.stages.common.runtime.runner import Call, run_call
from quiver.stages.common.store import Store
from tests.stages.optimize import world
from tests.stages.optimize.hosts import two_hosts
from tests.stages.sharing import wait
from tests.tiny import make_policy

pytestmark = pytest.mark.dist
QUICK = {"PET_RDZV_CONF": "join_timeout=60,keep_alive_interval=1,keep_alive_max_attempt=5"}
SCRIPT = """
import json, logging, sys
from quiver import run_stage
from quiver.schemas.errors import QuiverError

logging.basicConfig(level=logging.INFO)
store, config, refs, into, in_process = json.loads(sys.argv[1])
try:
    print(run_stage("optimize", config, store, into=into, in_process=in_process, **refs))
except QuiverError as error:
    print(json.dumps(error.to_dict()))
    sys.exit(error.exit_code)
"""


@pytest.fixture
def refs(store) -> dict[str, str]:
    policy = make_policy(store)
    rollouts, rewards = world.make(store, policy, world.even_share)
    return {"policy": str(policy.ref), "rollouts": str(rollouts.ref), "rewards": str(rewards.ref)}


def config(**changed):
    """AdamW's eps is 1, so that the step follows the gradient and not only its sign."""
    return world.config(**{"token_budget": 40, "learning_rate": 1e-2, "eps": 1.0, **changed})


def start(host, hosts, store, refs, settings, into, **variables):
    """What every host runs, in the environment that the documents name."""
    env = {name: text for name, text in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    env |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PET_NNODES": "2"}
    env |= {"PET_RDZV_ENDPOINT": f"{hosts[0].address}:29400", **variables}
    asked = [str(store.path), settings.model_dump(mode="json"), refs, into, False]
    command = [sys.executable, "-c", SCRIPT, json.dumps(asked)]
    return host.start(command, env, log_of(host, store))


def log_of(host, store) -> Path:
    return store.path.parent / f"{host.name}.log"


def ended(process, seconds: float = 120) -> dict | str:
    """What it printed last: a reference, or an error."""
    stdout, _ = process.communicate(timeout=seconds)
    last = stdout.splitlines()[-1]
    return json.loads(last) if last.startswith("{") else last


def await_step(hosts, store, running, number: int) -> None:
    """Only the first rank tells of its steps, and it is on either host."""
    deadline = time.monotonic() + 120
    while not any(f"step {number}:" in log_of(host, store).read_text() for host in hosts):
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
    settings = config(epochs=4, processes=2, shard=shard)
    with two_hosts() as hosts:
        running = [start(host, hosts, store, refs, settings, "two") for host in hosts]
        assert [ended(process) for process in running] == ["two/policy@1", "two/policy@1"]
    assert store.open("two/policy@1").manifest.metrics["processes"] == 2
    start_gap = largest_gap(store, str(one), "tiny/policy@0")
    assert largest_gap(store, str(one), "two/policy@1") < 1e-5 < start_gap


@pytest.mark.slow
def test_torchruns_own_launcher_on_two_hosts(store, refs, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    settings = config(epochs=2)
    one = run_stage("optimize", settings, store, into="one", in_process=True, **refs)
    asked = json.dumps([str(store.path), settings.model_dump(mode="json"), refs, "two", True])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    with two_hosts() as hosts:
        running = []
        for host in hosts:
            meeting = f"--rdzv-endpoint={hosts[0].address}:29400 --rdzv-backend=c10d --nnodes=2"
            meeting += f" --rdzv-conf=is_host={host is hosts[0]} --local-addr={host.address}"
            command = [sys.executable, "-m", "torch.distributed.run", *meeting.split()]
            command += ["--nproc-per-node=1", str(script), asked]
            variables = env | {"GLOO_SOCKET_IFNAME": "cable"}
            running.append(host.start(command, variables, log_of(host, store)))
        assert [ended(process) for process in running] == ["two/policy@1", "two/policy@1"]
    assert largest_gap(store, str(one), "two/policy@1") < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dying", "death"),
    [
        (0, "kill"),
        (1, "kill"),
        (0, "unplug"),
        (1, "unplug"),
    ],
    ids=["meeting place killed", "killed", "meeting place unplugged", "unplugged"],
)
def test_of_a_host_that_dies_the_other_learns(store, refs, dying, death):
    """Killed, its connections are reset; without power or cable nobody is told."""
    quick = {"PET_RDZV_CONF": "keep_alive_interval=1,keep_alive_max_attempt=5"}
    with two_hosts() as hosts:
        running = [
            start(host, hosts, store, refs, config(epochs=4000, processes=2), "two", **quick)
            for host in hosts
        ]
        await_step(hosts, store, running, 3)
        getattr(hosts[dying], death)()
        error = ended(running[1 - dying], 90)
    assert error["code"] == "E-RESOURCE", error
    assert error["message"] in (
        "the host of the rendezvous is gone, or its ranks failed",
        "another host was silent for 5 s",
    )
    assert store.numbers("two", "policy") == []


ALGORITHM = """
import os

from quiver.schemas.errors import NumericError
from quiver.stages.optimize.algorithms import Algorithm


def plain(tokens):
    if os.environ.get("RANK") == "1":
        raise NumericError("mine", "what rank 1 alone meets")
    return -tokens.logprobs * tokens.advantages, tokens.logprobs > 0


ALGORITHM = Algorithm("mine", "leave_one_out", plain, "token_mean", {})
"""


@pytest.mark.slow
def test_an_error_of_one_host_ends_the_other(store, refs, tmp_path):
    (tmp_path / "mine.py").write_text(ALGORITHM)
    settings = config(algorithm=f"{tmp_path / 'mine.py'}:ALGORITHM", processes=2)
    with two_hosts() as hosts:
        running = [start(host, hosts, store, refs, settings, "two") for host in hosts]
        errors = [ended(process) for process in running]
    assert sorted(error["code"] for error in errors) == ["E-NUMERIC", "E-RESOURCE"]
    assert any("ranks" in error["message"] and "failed" in error["message"] for error in errors)
    assert store.numbers("two", "policy") == []


@pytest.mark.slow
def test_a_defect_of_one_host_is_told_as_it_is(store, refs, tmp_path):
    """That of the host with the meeting place; the other one only learns that it failed."""
    text = ALGORITHM.replace('NumericError("mine",', "RuntimeError(").replace('== "1"', '== "0"')
    (tmp_path / "mine.py").write_text(text)
    settings = config(algorithm=f"{tmp_path / 'mine.py'}:ALGORITHM", processes=2)
    with two_hosts() as hosts:
        running = [start(host, hosts, store, refs, settings, "two", **QUICK) for host in hosts]
        errors = [ended(process) for process in running]
    assert sorted(error["code"] for error in errors) == ["E-INTERNAL", "E-RESOURCE"]
    assert "what rank 1 alone meets" in str(errors)
    assert "Connection" not in str(errors)


@pytest.mark.slow
def test_hosts_that_do_not_see_one_store_are_told(store, refs):
    copy = store.path.parent / "copy"
    shutil.copytree(store.path, copy, symlinks=True)
    named = {"PET_RDZV_ID": "night", **QUICK}
    with two_hosts() as hosts:
        running = [
            start(host, hosts, each, refs, config(processes=2), "two", **named)
            for host, each in zip(hosts, (store, Store(copy)), strict=True)
        ]
        errors = [ended(process) for process in running]
    assert [error["code"] for error in errors] == ["E-CONFIG", "E-CONFIG"], errors
    assert all("does not see the store of the first one" in error["message"] for error in errors)
    assert store.numbers("two", "policy") == Store(copy).numbers("two", "policy") == []


def local(monkeypatch, **variables) -> str:
    """This host as one of two that meet here; where."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    for name, text in {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": endpoint, **variables}.items():
        monkeypatch.setenv(name, text)
    return endpoint


RANK = """
import os, sys, time
from pathlib import Path

answer, manner = Path(sys.argv[1]), sys.argv[2]
answer.with_name(f"{answer.stem}-{os.environ['RANK']}.json").write_text('{"ref": "a/policy@1"}')
time.sleep(3)  # all have begun
if manner == "abort":
    os.abort()
time.sleep(4)
"""
AGENT = """
import sys
from pathlib import Path
from quiver.stages.common import ranks, rendezvous

rendezvous._GRACE_SECONDS = 0.5
command = [sys.executable, "-c", sys.argv[1], *sys.argv[2:]]
call = {"stage": "optimize", "config": {}, "store": "/"}
sys.exit(ranks.launch(command, Path(sys.argv[2]), call))
"""


def test_a_rank_that_ends_badly_behind_its_answer_is_no_failure_of_any_host(monkeypatch, tmp_path):
    local(monkeypatch, **QUICK)
    agents = []
    for manner in ("abort", "stay"):
        command = [sys.executable, "-c", AGENT, RANK, str(tmp_path / f"{manner}.json"), manner]
        agents.append(subprocess.Popen(command))
    assert [agent.wait(60) for agent in agents] == [0, 0]
    for manner in ("abort", "stay"):
        assert json.loads((tmp_path / f"{manner}.json").read_text()) == {"ref": "a/policy@1"}


def test_a_host_that_was_started_again_while_it_waited_is_one_host(monkeypatch):
    from torch.distributed import TCPStore

    local(monkeypatch, PET_RDZV_CONF="keep_alive_interval=1,keep_alive_max_attempt=5")
    monkeypatch.setenv("PET_NNODES", "3")
    there = several_hosts()
    meeting = TCPStore(there.host, there.port, is_master=True, wait_for_workers=False)
    problems = []
    watches = [Watch(there, "night", problems.append) for _ in range(4)]
    for watch in watches:
        watch._ranks_ended.set()  # else the tests are sent SIGTERM where one is lost
    first, killed, again, third = watches
    with ExitStack() as running:
        running.enter_context(first)
        with killed:
            wait(lambda: meeting.check(["quiver/night/beat/2"]))
        time.sleep(3)
        running.enter_context(again)
        time.sleep(3)
        assert not first._has_begun
        running.enter_context(third)
        wait(lambda: first._has_begun)
        time.sleep(there.silence + 2)
        assert [watch.problem for watch in watches] == [""] * 4 and not problems


GIVING_UP = """
import signal
from quiver.stages.common import rendezvous

rendezvous._GRACE_SECONDS = 0.1
arrived = []
signal.signal(signal.SIGTERM, lambda *_: arrived.append("signal"))
there = rendezvous.several_hosts()
watch = rendezvous.Watch(there, "night", arrived.append)
watch._lose("nobody is there")
in_time = rendezvous.Watch(there, "night", arrived.append)
in_time.__exit__()
in_time._lose("nobody is there")
print(arrived)
"""


def test_who_waits_where_no_signal_arrives_gives_up(monkeypatch):
    """As in a store whose host is gone without a word. In a process of its own: once a test has
    run a command in the tests' process, that one ends at SIGTERM."""
    local(monkeypatch)
    done = subprocess.run(
        [sys.executable, "-c", GIVING_UP], check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "['signal', 'nobody is there']"


def test_an_id_brings_no_different_calls_together(monkeypatch):
    local(monkeypatch, PET_RDZV_ID="night")
    there = several_hosts()
    call = {"stage": "optimize", "config": {"learning_rate": 0.1}, "store": "/a", "stay": True}

    def run_id(**changed) -> str:
        return ranks._agent(there, {**call, **changed})[0].run_id

    assert run_id().startswith("night-")
    assert run_id() == run_id(stay=False) == run_id(store="/b")
    assert run_id() != run_id(config={"learning_rate": 0.2})


def test_hosts_of_different_calls_are_told_so(monkeypatch):
    from torch.distributed import TCPStore

    local(monkeypatch)
    there = several_hosts()
    meeting = TCPStore(there.host, there.port, is_master=True, wait_for_workers=False)
    watches = [Watch(there, run_id, print) for run_id in ("night", "day")]
    error = TimeoutError("no host came")
    with watches[0]:
        wait(lambda: meeting.check(["quiver/night/beat/1"]))
        assert "other settings" not in watches[0].problem_of(error)
        with watches[1]:
            for watch in watches:
                wait(lambda watch=watch: "with other settings" in watch.problem_of(error))
    assert "beat" not in [thread.name for thread in threading.enumerate()]


def test_who_waits_for_hosts_that_do_not_come_is_told_why(store, refs, monkeypatch):
    endpoint = local(monkeypatch, PET_RDZV_CONF="join_timeout=12", ACCELERATE_USE_CPU="true")
    lines: list[str] = []
    call = Call("optimize", config().model_dump(mode="json"), store.path, refs)
    with pytest.raises(ResourceError, match=f"not all of 2 hosts at {endpoint} ") as caught:
        run_call(call, on_line=lines.append)
    assert f"waits for 2 hosts at {endpoint} (PET_NNODES, PET_RDZV_ENDPOINT)" in str(lines)
    message = caught.value.message
    assert "unset PET_NNODES where one host is meant" in message and not message.endswith(": ")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PET_NNODES": "1:2"}, "expected one number of hosts, found 1:2"),
        ({"PET_NNODES": "2"}, "expected HOST:PORT, found ''"),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "first"}, "expected HOST:PORT"),
        (
            {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1", "PET_RDZV_CONF": "retries=3"},
            "found retries=3",
        ),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:65536"}, "expected HOST:PORT"),
        ({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:0"}, "expected HOST:PORT"),
        (
            {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1", "PET_NPROC_PER_NODE": "0"},
            "expected a number of ranks, found 0",
        ),
        (
            {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "a:1", "PET_NPROC_PER_NODE": "gpu"},
            "expected a number of ranks, found gpu",
        ),
        (
            {
                "PET_NNODES": "2",
                "PET_RDZV_ENDPOINT": "a:1",
                "PET_RDZV_CONF": "keep_alive_interval=0",
            },
            "found keep_alive_interval=0",
        ),
    ],
)
def test_variables_that_say_nothing_of_use_are_refused(variables, problem):
    with pytest.raises(ConfigError, match=problem):
        several_hosts(variables)


def test_what_a_worker_starts_meets_nobody():
    """Though the worker itself was started where hosts are named."""
    script = "import quiver.flows, os; print(os.environ.get('PET_NNODES'))"
    for is_worker, nodes in ((False, "2"), (True, "None")):
        environment = {**os.environ, "PET_NNODES": "2"}
        environment |= {"PREFECT__FLOW_RUN_ID": "1"} if is_worker else {}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, check=True, capture_output=True
        )
        assert done.stdout.decode().strip() == nodes


@pytest.mark.parametrize("nodes", ["", "1", "1:1"])
def test_one_host_meets_nobody(nodes):
    assert several_hosts({"PET_NNODES": nodes}) is None


def test_what_torchrun_takes_is_taken():
    said = {"PET_NNODES": "2:2", "PET_NPROC_PER_NODE": "8", "PET_RDZV_ENDPOINT": "[::1]:29400"}
    there = several_hosts(said)
    assert (there.nodes, there.host, there.port) == (2, "::1", 29400)
    assert (ranks_a_host(None, there), ranks_a_host(4, there)) == (8, 2)


def test_a_host_without_a_beat_is_dead_after_all_attempts():
    said = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "first:29400"}
    assert several_hosts(said).silence == 60.0  # 12 beats, one in 5 seconds
    asked = several_hosts({**said, "PET_RDZV_CONF": "keep_alive_interval=30"})
    assert (asked.silence, asked.settings["join_timeout"]) == (360.0, 600)


@pytest.mark.parametrize(
    ("processes", "variables", "count"),
    [
        (None, {}, 1),
        (4, {}, 4),
        (None, {"PET_NNODES": "3"}, 3),
        (None, {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "8"}, 24),
        (6, {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "8"}, 6),
        (1, {"PET_NNODES": "3"}, 3),
        (None, {"PET_NNODES": "two"}, 2),
        (4, {"WORLD_SIZE": "4"}, 1),
    ],
)
def test_how_many_ranks_all_hosts_start(monkeypatch, processes, variables, count):
    """More than 1 where `launch` has to refuse what is said: one process alone would not meet the
    others, and train by itself."""
    endpoint = {"PET_RDZV_ENDPOINT": "first:29400"}
    for name, text in {**endpoint, **variables}.items():
        monkeypatch.setenv(name, text)
    assert ranks.needed("optimize", {"processes": processes}) == count
    assert ranks.needed("reward", {"processes": processes}) == 1


def test_a_name_that_leads_to_the_host_itself_is_refused(monkeypatch):
    """As /etc/hosts of Debian has the host's own name."""
    known = {"first": "127.0.1.1", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    ask = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *others, **more: ask(known[host], *others, **more)
    )
    there = several_hosts({"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "first:29400"})
    with pytest.raises(ConfigError, match=r"first leads to 127\.0\.1\.1 on this host"):
        address_towards(there)
    for host in ("localhost", "127.0.0.1"):  # to try it on one machine
        assert address_towards(there._replace(host=host)) == ("127.0.0.1", True)


def test_ranks_are_shared_out_evenly(store, refs, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_RDZV_ENDPOINT", "127.0.0.1:29400")
    with pytest.raises(ConfigError, match="3 ranks cannot be shared out evenly among 2 hosts"):
        run_stage("optimize", config(processes=3), store, **refs)
    with pytest.raises(ConfigError, match="1 rank cannot be shared out evenly among 2 hosts"):
        run_stage("optimize", config(processes=1), store, **refs)
    monkeypatch.setenv("PET_NNODES", "two")
    with pytest.raises(ConfigError, match="expected one number of hosts, found two"):
        run_stage("optimize", config(), store, **refs)
