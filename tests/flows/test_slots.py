"""What waits for what: one stage a device, and one process a piece of work. The next one waits,
says for whom, and goes on when the other has finished or is dead."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from quiver import run_stage
from quiver.flows import dispatch
from quiver.flows.dispatch import run_at, run_when_free
from quiver.flows.placement import StageCall
from quiver.flows.recipe import Placement
from quiver.flows.slots import gpus_needed, slots, visible_gpus
from quiver.schemas.errors import BusyError, ConfigError
from quiver.stages.common.runtime.runner import Call
from quiver.stages.common.runtime.subprocesses import Stopped
from tests.benchmarks.made import make_prompts, make_rollouts, tiny_policy

GENERATE = Call("generate", {"engine": "vllm", "options": {}}, "store")
OPTIMIZE = Call("optimize", {}, "store")
HOLDER = """
import time
from quiver.flows.slots import slots
from quiver.stages.common.runtime.runner import Call
with slots(Call('optimize', {}, 'store'), 'killed'):
    print('held', flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_each_stage_has_a_device_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    with slots(GENERATE, "one") as first, slots(OPTIMIZE, "two") as second:
        assert (first, second) == ({"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5"})
    with slots(Call("generate", {"options": {"tensor_parallel_size": 2}}, "store"), "both") as both:
        assert both == {}, "the child sees the same devices as this process"


def test_the_next_one_waits_and_says_for_whom(monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    caplog.set_level(logging.INFO, "quiver")
    order, began = [], threading.Event()

    def second():
        began.set()
        with slots(OPTIMIZE, "arith · optimize 1/3"):
            order.append("second")

    with slots(GENERATE, "other · generate 2/3"):
        waiting = threading.Thread(target=second)
        waiting.start()
        began.wait()
        while not caplog.messages:
            time.sleep(0.01)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]
    assert caplog.messages[0].startswith(
        "arith · optimize 1/3 waits: gpu-0 is held by other · generate 2/3 (process "
    )


def test_a_killed_holder_holds_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    os.kill(holder.pid, signal.SIGSTOP)  # its memory is still on the device
    with monkeypatch.context() as patch, pytest.raises(Stopped):
        waits = iter([False, False, False, True])
        patch.setattr("quiver.flows.slots.is_stopped", lambda: next(waits))
        with slots(GENERATE, "waits"):
            pass
    holder.kill()
    holder.wait()
    with slots(GENERATE, "has it"):
        pass


def test_without_a_gpu_heavy_stages_queue_by_option(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    light = Call("prompt", {}, "store")
    with slots(GENERATE, "a", cpu=1), slots(light, "b", cpu=1):
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr("quiver.flows.slots.is_stopped", lambda: True)
            with slots(OPTIMIZE, "c", cpu=1):
                pass
        with slots(OPTIMIZE, "any number"):
            pass


@pytest.mark.parametrize(
    ("stage", "config", "count"),
    [
        ("generate", {}, 1),
        ("generate", {"engine": "scripted"}, 0),
        ("generate", {"device": "cpu"}, 0),
        (
            "generate",
            {"options": {"tensor_parallel_size": 2, "engine_args": {"pipeline_parallel_size": 3}}},
            6,
        ),
        ("generate", {"options": {"engine_args": {"data_parallel_size": 2}}}, 2),
        ("generate", {"engine": "mine.py:Engine", "options": {"tensor_parallel_size": "a"}}, 1),
        ("reward", {"functions": [{"use": "math"}]}, 0),
        ("reward", {"models": [{"model": "a"}, {"model": "b", "device": "cpu"}, {}]}, 2),
        ("reward", {"models": [{"engine_args": {"tensor_parallel_size": 2}}, {}]}, 3),
        ("optimize", {"processes": None}, 1),
        ("optimize", {"processes": 4}, 4),
        ("optimize", {"processes": 4, "device": "cpu"}, 0),
        ("prompt", {}, 0),
    ],
)
def test_who_needs_a_device(stage, config, count):
    assert gpus_needed(Call(stage, config, "store")) == count


@pytest.mark.parametrize(
    ("stage", "config", "numbers"),
    [
        ("generate", {"options": {"tensor_parallel_size": 4}}, ("generate.options", 4, 3)),
        ("optimize", {"processes": 8}, ("optimize.processes", 8, 3)),
        (
            "reward",
            {"models": [{"engine_args": {"tensor_parallel_size": 4}}]},
            ("reward.models", 4, 3),
        ),
        ("reward", {"models": [{}] * 4}, None),
        ("optimize", {"processes": 3}, None),
    ],
)
def test_more_devices_than_there_are_is_refused(monkeypatch, stage, config, numbers):
    """But for reward models, which share them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    call = Call(stage, config, "store")
    if numbers is None:
        with slots(call, "a") as env:
            assert env == {}
        return
    name, needed, there = numbers
    with pytest.raises(ConfigError) as caught, slots(call, "a"):
        pass
    assert caught.value.object == name
    assert (
        caught.value.message == f"{needed} GPUs are needed, and this machine has {there} (0, 1, 2)"
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with slots(call, "the CPU decides for itself"):
        pass


def test_no_device_is_visible_where_the_variable_is_empty(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, GPU-abc")
    assert visible_gpus() == ["0", "GPU-abc"]


def test_the_first_rank_of_a_launcher_holds_the_devices_of_all(monkeypatch, tmp_path):
    """Each rank takes the device of its number by itself, so none may be hidden from it."""
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, text in {"CUDA_VISIBLE_DEVICES": "2,5,7", **sizes}.items():
        monkeypatch.setenv(name, text)
    folder = tmp_path / f"quiver-slots-{os.getuid()}"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with slots(OPTIMIZE, "rank 1", cpu=1) as env:
        assert env == {} and not folder.exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with slots(OPTIMIZE, "rank 0", cpu=1) as env:
        assert env == {} and sorted(os.listdir(folder)) == ["gpu-2", "gpu-5"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 GPUs are needed"), slots(OPTIMIZE, "too many"):
        pass


# -- the same work

SLOW = """
import os, time

def once(completions, **_):
    open("begun", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    return [1.0] * len(completions)
"""
SCORER = """
import json, sys
from quiver.stages.common.runtime.runner import Call, run_call

run_call(Call(**json.loads(sys.argv[1])))
"""


@pytest.fixture
def call(store, tmp_path, monkeypatch, short_patience):
    """Scoring that another process is at: it waits for a file `go`."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    rollouts = make_rollouts(store, tiny_policy(store), 4, 8, 8, 2, asked=make_prompts(store, 2))
    return StageCall(
        stage="reward",
        config={"functions": [{"use": "slow.py:once"}]},
        store=str(store.path),
        refs={"rollouts": str(rollouts.ref)},
        label="mine",
    )


@pytest.fixture
def short_patience(monkeypatch):
    """Of those that share, with one that does not."""
    monkeypatch.setattr("quiver.stages.common.store.writer._JOIN_SECONDS", 0.1)


@pytest.fixture
def holder(call, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCORER, json.dumps(call.runner_call.__dict__)]
    )
    while not (tmp_path / "begun").exists():
        assert process.poll() is None
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


def waiting(call, caplog):
    """A thread that runs `call` when it is free, and has said that it waits; and where its outcome
    will be."""
    caplog.set_level(logging.INFO, "quiver")
    found = []

    def wait():
        try:
            found.append(run_when_free(call, Placement()))
        except Stopped as stopped:
            found.append(stopped)

    thread = threading.Thread(target=wait)
    thread.start()
    while not any(message.startswith("mine waits: process ") for message in caplog.messages):
        assert thread.is_alive()
        time.sleep(0.02)
    return thread, found


def test_who_is_refused_is_told_of_what_the_call_can_do(call, holder, tmp_path):
    """No command of the shell takes `share`; calls from Python do."""
    with pytest.raises(BusyError) as caught:
        run_at(call, Placement())
    assert caught.value.next == "wait for it, then run again"
    with pytest.raises(BusyError) as caught:
        run_stage("reward", call.config, call.store, in_process=True, **call.refs)
    assert caught.value.next == (
        "wait for it, then run again; or make all these calls with share=True, and they do it "
        "together"
    )
    with pytest.raises(BusyError, match="is at this very work alone") as caught:
        run_stage("reward", call.config, call.store, in_process=True, share=True, **call.refs)
    assert "share" not in caught.value.next, "it is asked for already"
    (tmp_path / "go").touch()


@pytest.mark.parametrize("end", ["finishes", "is killed"])
def test_who_comes_second_gets_what_there_is_or_goes_on(call, holder, caplog, tmp_path, end):
    with pytest.raises(BusyError):
        run_at(call, Placement())  # a shell command is told at once
    thread, found = waiting(call, caplog)
    if end == "is killed":
        holder.kill()
    (tmp_path / "go").touch()
    thread.join()
    assert (found[0].cached, found[0].rows, found[0].metrics["reward_mean"]) == (
        end == "finishes",
        4,
        1.0,
    )


def test_who_is_wanted_no_longer_waits_no_longer(call, holder, caplog, monkeypatch):
    wanted = threading.Event()
    monkeypatch.setattr(dispatch, "is_stopped", wanted.is_set)
    thread, found = waiting(call, caplog)
    wanted.set()
    thread.join()
    assert isinstance(found[0], Stopped)


def test_who_waits_has_the_answer_as_soon_as_it_is_there(call, monkeypatch):
    """Not at the end of a pause, which grows to a minute."""
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr(dispatch, "time", clock)
    monkeypatch.setattr(dispatch, "find", lambda *_, **__: "done" if now[0] >= 70 else None)

    def run(*_, **__):
        if now[0] < 70:
            raise BusyError("a/rewards", "another process is at it")
        return "done"

    monkeypatch.setattr(dispatch, "run_at", run)
    assert run_when_free(call, Placement()) == "done" and now[0] < 72
