"""`placement.resident_engine`: one engine for the policies of a run sleeps while other stages work.

In doubt there is a fresh one, and no process is left in the end.
"""

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from quiver.flows.calls import run_here
from quiver.flows.dispatch import run_at
from quiver.flows.placement import check_resident, keeps_engine
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError, CorruptError
from quiver.stages.core.run import stage_process
from quiver.stages.core.run.call import Call, Where
from quiver.stages.core.store import Store
from quiver.stages.model import vllm_env
from tests.flows.conftest import (
    left_behind,
    quiver,
    write_recipe,
)
from tests.stages.generate.making import random_prompts
from tests.stages.sharing import copy
from tests.tiny import make_policy

ENGINE = """
import os
from pathlib import Path

from quiver.stages.generate.engines.scripted import ScriptedEngine

HERE = Path(__file__).parent


def note(event):
    with open(HERE / "events", "a") as file:
        file.write(f"{event} {os.getpid()}\\n")


class Engine(ScriptedEngine):
    # Notes what becomes of it; with a file `fault` it fails to take a policy.

    def __init__(self, setup):
        note("start")
        super().__init__(setup)

    def sleep(self):
        note("sleep")
        if (HERE / "restless").exists():
            raise RuntimeError("the device does not answer")
        return not (HERE / "sleepless").exists()

    def take(self, setup):
        fault = HERE / "fault"
        if fault.exists():
            fault.unlink()
            raise RuntimeError("the device is gone")
        if setup.max_model_len != self.setup.max_model_len:
            return False
        note("take")
        super().__init__(setup)
        return True

    def generate(self, requests):
        # answers that follow from the policy, too
        number = int(self.setup.policy.manifest.content_hash[:8], 16)
        yield from super().generate(each._replace(seed=each.seed ^ number) for each in requests)

    def close(self):
        note("close")
"""
WITH_A_MODEL = ENGINE.replace(
    "scripted import Scripted", "transformers import Transformers"
).replace("(ScriptedEngine", "(TransformersEngine")
RESIDENT = "placement.resident_engine=true"


def events(folder: Path) -> list[str]:
    """What became of the engines, in this order."""
    return [line.split()[0] for line in (folder / "events").read_text().splitlines()]


def pids(folder: Path) -> list[int]:
    """The processes of the engines that were started."""
    lines = (folder / "events").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("start")]


# -- calls of one stage


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Store:
    """Three policies of one architecture, and prompts."""
    store = Store(tmp_path_factory.mktemp("bare") / "store")
    for number in range(3):
        make_policy(store, f"p{number}", seed=number)
    random_prompts(store, 6)
    return store


@pytest.fixture
def place(bare, tmp_path, monkeypatch):
    """A folder with a store and the engine; no process waits in the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    copy(bare, tmp_path)
    (tmp_path / "mine.py").write_text(ENGINE)
    yield tmp_path
    stage_process.end_waiting()
    assert not [pid for pid in pids(tmp_path) if Path(f"/proc/{pid}").exists()]


def call(place: Path, number: int, *, resident: bool = True, config=(), **limits) -> Call:
    """Rollouts of policy `number`."""
    config = {
        "engine": f"{place / 'mine.py'}:Engine",
        "samples_per_prompt": 2,
        "sampling": {"max_tokens": 6},
        **dict(config),
    }
    refs = {"prompts": "tiny/prompts@1", "policy": f"p{number}/policy@0"}
    where = Where(resident_engine=resident, **limits)
    return Call("generate", config, str(place / "store"), refs, label="tiny", where=where)


def engine_info(place: Path, ref: str) -> dict:
    return Store(place / "store").open(ref).manifest.metrics["engine"]


def test_one_engine_answers_for_each_policy_in_turn_as_fresh_ones_do(place, bare, tmp_path_factory):
    (place / "mine.py").write_text(WITH_A_MODEL)
    for number in range(3):
        outcome = run_at(call(place, number))
        assert (outcome.ref, outcome.cached) == (f"tiny/rollouts@{number + 1}", False)
        info = engine_info(place, outcome.ref)
        has_slept = (True, number + 1) if number else (None, None)
        assert (info.get("resident"), info.get("policies")) == has_slept
    assert events(place) == ["start", "sleep", "take", "sleep", "take", "sleep"]
    stage_process.end_waiting()
    assert events(place)[-1] == "close"
    stores = [Store(place / "store"), copy(bare, tmp_path_factory.mktemp("fresh"))]
    for number in range(3):
        ref = run_at(replace(call(place, number, resident=False), store=stores[1].url)).ref
        resident, fresh = (store.open(ref).manifest for store in stores)
        assert resident.run_key == fresh.run_key
        assert resident.content_hash == fresh.content_hash
        assert "resident" not in fresh.metrics["engine"]
    contents = {stores[0].open(f"tiny/rollouts@{n}").manifest.content_hash for n in (1, 2, 3)}
    assert len(contents) == 3, "the policies answer differently"


def run_two(place: Path, between=lambda: None, **changed) -> None:
    """Rollouts of two policies, with something in between."""
    run_at(call(place, 0))
    between()
    assert run_at(call(place, 1, **changed)).ref == "tiny/rollouts@2"


def kill(place, monkeypatch):
    os.kill(pids(place)[0], signal.SIGKILL)
    stage_process._waiting["generate"].process.wait(10)


def fail_next(place, monkeypatch):
    (place / "fault").touch()


def edit(place, monkeypatch):
    (place / "mine.py").write_text(f"{ENGINE}\n")


def leave(place, monkeypatch):
    pass


@pytest.mark.parametrize(
    ("happen", "changed", "closes", "reason"),
    [
        (kill, {}, False, ""),
        (fail_next, {}, True, "cannot load p1/policy@0: RuntimeError: the device is gone"),
        (edit, {}, True, "cannot load p1/policy@0: it was made for another engine, or for other"),
        (leave, {"config": {"max_model_len": 32}}, True, "cannot load p1/policy@0: it was made"),
    ],
)
def test_in_doubt_a_fresh_engine_replaces_it(
    place, monkeypatch, caplog, happen, changed, closes, reason
):
    caplog.set_level(logging.WARNING, "quiver.stages")  # as the command line shows it
    caplog.set_level(logging.INFO, "quiver")
    run_two(place, lambda: happen(place, monkeypatch), **changed)
    assert events(place) == ["start", "sleep", *["close"] * closes, "start", "sleep"]
    assert "resident" not in engine_info(place, "tiny/rollouts@2")
    lines = [line for line in caplog.messages if "trying again in a fresh process" in line]
    assert len(lines) == bool(reason) and all(reason in line for line in lines)


def test_a_policy_with_a_damaged_file_is_not_taken(place):
    def damage():
        path = Store(place / "store").open("p1/policy@0").files.folder / "model.safetensors"
        path.chmod(0o644)
        weights = bytearray(path.read_bytes())
        weights[-1] ^= 1
        path.write_bytes(weights)

    with pytest.raises(CorruptError, match="sha256"):
        run_two(place, damage)
    assert "take" not in events(place)


@pytest.mark.parametrize("cause", ["sleepless", "restless"])
def test_one_that_does_not_sleep_ends_with_its_answer(place, cause):
    (place / cause).touch()
    run_two(place)
    assert events(place) == ["start", "sleep", "close"] * 2


@pytest.mark.parametrize("cause", ["sleepless", "restless"])
def test_one_that_does_not_sleep_any_more_ends_with_its_answer(place, cause):
    run_two(place, (place / cause).touch)
    assert events(place) == ["start", "sleep", "take", "sleep", "close"]
    assert not stage_process._waiting


def test_a_call_that_keeps_no_process_takes_the_resident_one_and_ends_it(place):
    run_at(call(place, 0))
    stage_process.start_ahead("generate", call(place, 1).config)  # there is one already
    assert run_at(call(place, 1, resident=False)).ref == "tiny/rollouts@2"
    assert events(place) == ["start", "sleep", "take", "close"]
    assert not stage_process._waiting


def test_a_stage_by_hand_keeps_no_engine(place):
    run_here(call(place, 0), (), ())
    assert events(place) == ["start", "close"]
    assert not stage_process._waiting


def test_processes_that_share_the_shards_have_fresh_engines(place):
    run_at(call(place, 0, devices=2, config={"rows_per_shard": 3}))
    assert "sleep" not in events(place)


# -- what is refused


VLLM = "generate.engine='vllm'"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([VLLM], "CPU build repacks weights"),
        (["generate.engine='transformers'"], "nothing to keep"),
        (
            ["generate.engine='mine.py:Engine'", "placement.generate='gpus'"],
            "a new process for each call",
        ),
        ([VLLM, "generate.options.engine_args.quantization='fp8'"], "engine_args"),
        ([VLLM, "data.images='pictures'"], "pictures"),
        ([VLLM, "optimize.lora.save='adapter'"], "serves an adapter"),
        ([VLLM, "optimize.lora.rank=4", "generate.options.lora=true"], "serves an adapter"),
    ],
)
def test_where_no_engine_can_stay_it_is_refused(recipe, settings, problem):
    if settings == [VLLM] and not vllm_env.find_build("test").cpu:
        pytest.skip("vLLM's GPU build reloads weights")
    loaded = load(recipe, [RESIDENT, *settings])
    with pytest.raises(ConfigError, match=problem) as caught:
        check_resident(loaded.placement, loaded.generate, loaded.optimize, loaded.media)
    assert caught.value.object == "placement.resident_engine"
    assert caught.value.next == "set placement.resident_engine = false"


@pytest.mark.parametrize(
    "settings", [[VLLM, "placement.python.generate='python'"], ["generate.engine='mine.py:Engine'"]]
)
def test_an_interpreter_of_its_own_is_asked_by_the_engine(recipe, settings):
    """This interpreter's vLLM is not asked, nor for an engine of the user's."""
    loaded = load(recipe, [RESIDENT, *settings])
    check_resident(loaded.placement, loaded.generate, loaded.optimize, loaded.media)


# -- the default


JUDGE = "reward.models=[{name='judge', model='model', engine='vllm', device='%s'}]"


@pytest.mark.parametrize(
    ("num_gpus", "settings", "keeps"),
    [
        (1, [VLLM], True),
        (1, [VLLM, "placement.resident_engine=false"], False),
        (1, [VLLM, "generate.device='cpu'"], False),
        (1, [VLLM, "optimize.lora.save='adapter'"], False),
        (1, [VLLM, JUDGE % "cpu"], True),
        (1, [VLLM, JUDGE % "cuda"], False),
        (1, ["generate.engine='transformers'"], False),
        (1, ["generate.engine='mine.py:Engine'"], True),
        (0, ["generate.engine='mine.py:Engine'"], False),
        (2, [VLLM], False),
        (2, [VLLM, RESIDENT], True),
    ],
)
def test_on_one_gpu_an_engine_is_resident_by_default(recipe, num_gpus, settings, keeps):
    assert keeps_engine(load(recipe, settings), num_gpus) is keeps


# -- whole runs


SETTINGS = ("optimize.audit.enabled=false", "generate.engine='mine.py:Engine'")


@pytest.mark.prefect
def test_a_run_with_evaluations_on_one_gpu_starts_one_engine(tmp_path):
    """The first policy is measured, two are sampled from, and the last one is measured."""
    folder = write_recipe(tmp_path / "run")
    (folder / "mine.py").write_text(ENGINE)
    settings = [f"--set={setting}" for setting in SETTINGS]
    one_gpu = {"CUDA_VISIBLE_DEVICES": "0", "TMPDIR": str(folder)}
    quiver(folder, "run", "recipe.toml", *settings, **one_gpu)
    assert events(folder) == ["start", "sleep", *["take", "sleep"] * 3, "close"]
    assert not left_behind(folder)
