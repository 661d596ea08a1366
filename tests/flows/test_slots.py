"""Slots: one stage a device, the next one waits and says for whom, and a dead holder holds
nothing."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from quiver.flows.slots import gpus_needed, slots, visible_gpus
from quiver.schemas.errors import ConfigError
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call, Where

GENERATE = Call("generate", {"engine": "vllm", "options": {}}, "store")
OPTIMIZE = Call("optimize", {}, "store")
HOLDER = """
import time
from quiver.flows.slots import slots
from quiver.stages.core.run.runner import Call
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
    where = Where(slots=1)
    light = Call("prompt", {}, "store", where=where)
    with slots(replace(GENERATE, where=where), "a"), slots(light, "b"):
        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr("quiver.flows.slots.is_stopped", lambda: True)
            with slots(replace(OPTIMIZE, where=where), "c"):
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
    with slots(OPTIMIZE, "rank 1") as env:
        assert env == {} and not folder.exists()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with slots(OPTIMIZE, "rank 0") as env:
        assert env == {} and sorted(os.listdir(folder)) == ["gpu-2", "gpu-5"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="4 GPUs are needed"), slots(OPTIMIZE, "too many"):
        pass
