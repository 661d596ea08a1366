"""Several GPUs of one machine without a server: processes that share the shards of one call, each
with devices of its own. Devices are names in CUDA_VISIBLE_DEVICES here; the engine needs none."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from quiver.flows.dispatch import most_processes, run_at
from quiver.flows.slots import slots
from quiver.flows.stopping import run_ahead
from quiver.schemas.errors import NumericError, ResourceError
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call, Where
from quiver.stages.core.run.stage_process import run_call
from quiver.stages.core.store import Store
from tests.stages.generate.making import random_prompts
from tests.stages.sharing import copy, require_whole, wait
from tests.tiny import make_policy

ENGINE = """
import json, os, signal, time
from pathlib import Path

from quiver.schemas.errors import NumericError
from quiver.stages.generate.engines.scripted import ScriptedEngine

HERE = Path(__file__).parent
DEVICES = os.environ["CUDA_VISIBLE_DEVICES"]


class Engine(ScriptedEngine):
    # Notes where it runs, and waits until as many have come as the file `wanted` says.

    def __init__(self, setup):
        super().__init__(setup)
        here = {"devices": DEVICES, "cores": sorted(os.sched_getaffinity(0)), "pid": os.getpid()}
        note = HERE / f"note-{os.getpid()}"
        note.write_text(json.dumps(here))
        note.rename(HERE / f"engine-{os.getpid()}.json")
        print("engine is up", flush=True)
        while len(list(HERE.glob("engine-*"))) < int((HERE / "wanted").read_text()):
            time.sleep(0.01)

    def generate(self, requests):
        for completion in super().generate(requests):
            yield completion
            fault = HERE / f"fault-{DEVICES}"
            if fault.exists():
                if fault.read_text() == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise NumericError("engine", "of one device alone")
            time.sleep(0.01 if list(HERE.glob("fault-*")) else 0)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Store:
    """A policy, and prompts for 84 rows."""
    store = Store(tmp_path_factory.mktemp("bare") / "store")
    make_policy(store)
    random_prompts(store, 28)
    return store


@pytest.fixture
def place(bare, tmp_path, monkeypatch) -> Path:
    """A folder with a store and the engine; two devices, and slots of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    copy(bare, tmp_path)
    (tmp_path / "mine.py").write_text(ENGINE)
    (tmp_path / "wanted").write_text("2")
    return tmp_path


def call(place: Path, devices: int | str = "all", **changed) -> Call:
    config = {
        "engine": f"{place / 'mine.py'}:Engine",
        "samples_per_prompt": 3,
        "rows_per_shard": 6,
        "sampling": {"max_tokens": 8},
    }
    refs = {"prompts": "tiny/prompts@1", "policy": "tiny/policy@0"}
    config |= changed
    where = Where(devices=devices)
    return Call("generate", config, str(place / "store"), refs, label="tiny", where=where)


def engines(place: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in place.glob("engine-*.json")]


def require_gone(place: Path) -> None:
    assert not [each for each in engines(place) if Path(f"/proc/{each['pid']}").exists()]


def test_two_processes_on_devices_of_their_own_make_what_one_makes(place, bare, tmp_path_factory):
    lines = []
    outcome = run_at(call(place), on_line=lines.append)
    assert (outcome.ref, outcome.cached, outcome.rows) == ("tiny/rollouts@1", False, 84)
    assert run_at(call(place)).cached, "no process of a call that comes too late commits it"
    assert sorted(each["devices"] for each in engines(place)) == ["0", "1"]
    require_gone(place)
    store = Store(place / "store")
    require_whole(store, "tiny", "rollouts")
    assert {"engine is up  [GPU 0]", "engine is up  [GPU 1]"} <= set(lines)
    alone = copy(bare, tmp_path_factory.mktemp("alone"))
    (place / "wanted").write_text("0")
    run_call(replace(call(place), store=alone.url))
    one, two = (each.open("tiny/rollouts@1").manifest for each in (alone, store))
    assert (one.content_hash, one.run_key) == (two.content_hash, two.run_key)
    assert (two.metrics["workers"], one.metrics.get("workers", 1)) == (2, 1)


def test_one_that_is_killed_is_done_without(place, caplog):
    (place / "fault-1").write_text("kill")
    assert run_at(call(place)).ref == "tiny/rollouts@1"
    require_whole(Store(place / "store"), "tiny", "rollouts")
    require_gone(place)
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "SIGKILL" in warning and warning.endswith("the others go on")


@pytest.mark.parametrize(
    ("faults", "error", "message"),
    [
        ({0: "kill", 1: "kill"}, ResourceError, "SIGKILL"),
        ({0: "fail"}, NumericError, "of one device alone"),
    ],
)
def test_an_error_ends_all_and_writes_nothing(place, faults, error, message):
    for device, fault in faults.items():
        (place / f"fault-{device}").write_text(fault)
    with pytest.raises(error, match=message):
        run_at(call(place))
    assert len(engines(place)) == 2
    require_gone(place)
    assert Store(place / "store").numbers("tiny", "rollouts") == []


def test_who_wants_it_no_longer_ends_all_of_them(place):
    (place / "wanted").write_text("3")  # they wait for one that does not come
    with run_ahead(lambda: run_at(call(place))) as ahead:
        wait(lambda: len(engines(place)) == 2)
        ahead.stop.set()
        with pytest.raises(Stopped):
            ahead.result(30)
    require_gone(place)
    assert Store(place / "store").numbers("tiny", "rollouts") == []


def test_a_device_that_another_stage_has_holds_up_nobody(place, caplog):
    caplog.set_level(logging.INFO, "quiver")
    (place / "wanted").write_text("1")
    with slots(Call("optimize", {}, "store"), "other · optimize 1/1"):
        assert run_at(call(place)).rows == 84
    assert [each["devices"] for each in engines(place)] == ["1"]
    assert any("waits: gpu-0 is held by other" in message for message in caplog.messages)


def test_without_a_gpu_processes_share_the_cores(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = []
    assert run_at(call(place, devices=2), on_line=lines.append).rows == 84
    cores = [each["cores"] for each in engines(place)]
    mine = sorted(os.sched_getaffinity(0))
    assert sorted(core for each in cores for core in each) == (mine if len(mine) > 1 else mine * 2)
    assert {"engine is up  [1 of 2]", "engine is up  [2 of 2]"} <= set(lines)


def test_no_more_processes_than_shards(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    few = call(place, rows_per_shard=50)
    assert most_processes(few) == 8
    assert run_at(few).rows == 84
    assert len(engines(place)) == 2


@pytest.mark.parametrize(
    ("visible", "devices", "stage", "config", "count"),
    [
        ("0,1,2,3", None, "generate", {}, 1),
        ("0,1,2,3", "all", "generate", {}, 4),
        ("0,1,2,3", 3, "generate", {}, 3),
        ("0,1,2,3", "all", "generate", {"options": {"tensor_parallel_size": 2}}, 2),
        ("0,1,2,3", 1, "generate", {"options": {"tensor_parallel_size": 2}}, 1),
        ("0,1,2,3", "all", "generate", {"engine": "scripted"}, 1),
        ("0,1,2,3", "all", "reward", {"models": [{"model": "a"}, {"model": "b"}]}, 2),
        ("0,1,2,3", "all", "optimize", {}, 1),
        ("0,1,2,3", "all", "prompt", {}, 1),
        ("", 2, "generate", {"engine": "scripted"}, 2),
        ("", 2, "reward", {"models": [{"model": "a"}]}, 2),
        ("slots", "all", "logprobs", {}, 3),
    ],
)
def test_how_many_processes_a_stage_may_be(monkeypatch, visible, devices, stage, config, count):
    slots = 3 if visible == "slots" else 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.removeprefix("slots"))
    asked = Call(stage, config, "store", where=Where(devices=devices, slots=slots))
    assert most_processes(asked) == count
    assert most_processes(replace(asked, force=True)) == 1
