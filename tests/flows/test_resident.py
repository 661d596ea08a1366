"""`placement.resident_engine`: one engine for the policies of a run. It sleeps, in its process, while
other stages work; at any doubt there is a fresh one, and nobody is left in the end."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from quiver.flows.dispatch import run_at
from quiver.flows.placement import check_placement
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError, CorruptError, ResourceError
from quiver.stages.common.models import vllm_env
from quiver.stages.common.runtime import prewarm
from quiver.stages.common.runtime.call import Call, Where
from quiver.stages.common.store import Store
from tests.flows.conftest import (
    RECIPE,
    command_environment,
    left_behind,
    quiver,
    write_recipe,
)
from tests.stages.generate import guessing
from tests.stages.generate.making import random_prompts
from tests.stages.sharing import copy, wait
from tests.tiny import make_policy

ENGINE = """
import os, signal, time
from pathlib import Path

from quiver.stages.generate.engines.scripted import ScriptedEngine

HERE = Path(__file__).parent


def note(event):
    with open(HERE / "events", "a") as file:
        file.write(f"{event} {os.getpid()}\\n")


class Engine(ScriptedEngine):
    # Notes what becomes of it; a file `fault` says what goes wrong when it is to take a policy.

    def __init__(self, setup):
        note("start")
        super().__init__(setup)

    def sleep(self):
        note("sleep")
        return not (HERE / "sleepless").exists()

    def take(self, setup):
        fault = HERE / "fault"
        if fault.exists():
            kind = fault.read_text()
            fault.unlink()
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(600)
            raise RuntimeError("the device is gone")
        if setup.options != self.setup.options:
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
    prewarm.end_waiting()
    assert not [pid for pid in pids(tmp_path) if Path(f"/proc/{pid}").exists()]


def call(place: Path, number: int, *, stay: bool = True, config=(), **limits) -> Call:
    """Rollouts of policy `number`."""
    config = {
        "engine": f"{place / 'mine.py'}:Engine",
        "samples_per_prompt": 2,
        "sampling": {"max_tokens": 6},
        **dict(config),
    }
    refs = {"prompts": "tiny/prompts@1", "policy": f"p{number}/policy@0"}
    where = Where(stay=stay, **limits)
    return Call("generate", config, place / "store", refs, label="tiny", where=where)


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
    prewarm.end_waiting()
    assert events(place)[-1] == "close"
    stores = [Store(place / "store"), copy(bare, tmp_path_factory.mktemp("fresh"))]
    for number in range(3):
        ref = run_at(replace(call(place, number, stay=False), store=stores[1].path)).ref
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


def test_one_that_is_killed_in_its_sleep_costs_one_start(place):
    def kill():
        os.kill(pids(place)[0], signal.SIGKILL)

    run_two(place, kill)
    run_at(call(place, 2))
    assert events(place) == ["start", "sleep", "start", "sleep", "take", "sleep"]


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_one_that_can_not_take_a_policy_costs_one_start(place, fault, caplog):
    caplog.set_level(logging.WARNING, "quiver.stages")  # as the command line shows it
    caplog.set_level(logging.INFO, "quiver")
    run_two(place, lambda: (place / "fault").write_text(fault))
    assert [each for each in events(place) if each != "close"] == ["start", "sleep"] * 2
    assert "resident" not in engine_info(place, "tiny/rollouts@2")
    (line,) = [line for line in caplog.messages if "once more, in a fresh process" in line]
    assert "does not take p1/policy@0" in line or "SIGKILL" in line or "exit code" in line


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


def test_other_options_get_a_fresh_engine(place):
    run_two(place, config={"options": {"script": "echo"}})
    assert events(place) == ["start", "sleep", "close", "start", "sleep"]


def test_other_code_gets_a_fresh_engine(place):
    def edit():
        (place / "mine.py").write_text(ENGINE.replace('note("start")', 'note("started")'))

    run_two(place, edit)
    assert events(place) == ["start", "sleep", "close", "started", "sleep"]


def test_other_devices_get_a_fresh_engine(place, monkeypatch):
    run_two(place, lambda: monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1"))
    assert events(place) == ["start", "sleep", "start", "sleep"]


def test_one_that_does_not_sleep_ends_with_its_answer(place):
    (place / "sleepless").touch()
    run_two(place)
    assert events(place) == ["start", "sleep", "close"] * 2


def test_episodes_of_turns_are_answered_by_it_too(place):
    store = Store(place / "store")
    names = guessing.write_game(place / "game")
    prompts = guessing.render(store, store.open("p0/policy@0"), names)
    config = {
        "sampling": {"max_tokens": 8},
        "options": {"script": names["script"]},
        "turns": {"environment": names["environment"], "max_turns": 4},
    }
    outcomes = []
    for number, is_fresh in ((0, False), (1, False), (1, True)):
        refs = {"prompts": str(prompts.ref), "policy": f"p{number}/policy@0"}
        if is_fresh:
            prewarm.end_waiting()
        again = replace(call(place, number, config=config), refs=refs, force=True)
        outcomes.append(store.open(run_at(again).ref))
    assert events(place) == ["start", "sleep", "take", "sleep", "close", "start", "sleep"]
    resident, fresh = (version.table().to_pylist() for version in outcomes[1:])
    assert max(len(row["turns"]) for row in resident) > 1
    for name in ("rollout_id", "prompt_ids", "completion_ids", "seed"):  # a turn has its seconds
        assert [row[name] for row in resident] == [row[name] for row in fresh]


def test_what_is_done_already_wakes_nobody(place):
    run_two(place)
    assert run_at(call(place, 1)).cached
    run_at(replace(call(place, 1), force=True))
    assert [each for each in events(place) if each != "sleep"] == ["start", "take", "take"]


def test_a_call_that_asks_nobody_to_stay_takes_the_sleeper_and_ends_it(place):
    run_at(call(place, 0))
    assert run_at(call(place, 1, stay=False)).ref == "tiny/rollouts@2"
    assert events(place) == ["start", "sleep", "take", "close"]
    assert not prewarm._waiting


def test_a_time_limit_ends_one_that_hangs(place):
    run_at(call(place, 0))
    (place / "fault").write_text("hang")
    with pytest.raises(ResourceError, match="limit of 2 s"):
        run_at(call(place, 1, timeout_seconds=2))
    assert run_at(call(place, 1)).ref == "tiny/rollouts@2"
    assert events(place) == ["start", "sleep", "start", "sleep"]


CALLER = """
import json, sys, time
from quiver.flows.dispatch import run_at
from quiver.stages.common.runtime.call import Call
run_at(Call.from_json(json.loads(sys.argv[1])))
print("asleep", flush=True)
time.sleep(600)
"""


def test_one_that_sleeps_ends_with_a_caller_that_is_killed(place):
    command = [sys.executable, "-c", CALLER, json.dumps(call(place, 0).to_json())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as caller:
        assert caller.stdout.readline() == "asleep\n"
        (pid,) = pids(place)
        assert Path(f"/proc/{pid}").exists()
        caller.kill()
    wait(lambda: not Path(f"/proc/{pid}").exists())


def test_nothing_is_prewarmed_beside_one_that_sleeps(place):
    run_at(call(place, 0))
    before = dict(prewarm._waiting)
    prewarm.prewarm("generate", call(place, 1).config)
    assert before == prewarm._waiting and len(before) == 1


def test_processes_that_share_the_shards_have_fresh_engines(place):
    for number in range(2):
        shards = {"rows_per_shard": 3}
        run_at(call(place, number, devices=2, config=shards))
    assert "sleep" not in events(place)
    assert not prewarm._waiting


# -- what is refused


VLLM = "generate.engine='vllm'"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ([VLLM], "CPU build repacks weights"),
        (["generate.engine='transformers'"], "nothing to keep"),
        (["generate.engine='mine.py:Engine'", "placement.generate='gpus'"], "of its own each time"),
        ([VLLM, "generate.options.engine_args.quantization='fp8'"], "engine_args"),
        ([VLLM, "data.images='pictures'"], "pictures"),
        ([VLLM, "optimize.lora.save='adapter'"], "serves an adapter"),
        ([VLLM, "optimize.lora.rank=4", "generate.options.lora=true"], "serves an adapter"),
    ],
)
def test_where_no_engine_can_stay_it_is_refused(tmp_path, settings, problem):
    if settings == [VLLM] and not vllm_env.find_build("test").cpu:
        pytest.skip("vLLM's GPU build reloads weights")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load(tmp_path / "recipe.toml", [RESIDENT, *settings])
    with pytest.raises(ConfigError, match=problem) as caught:
        check_placement(recipe)
    assert caught.value.object == "placement.resident_engine"
    assert caught.value.next == "set placement.resident_engine = false"


def test_an_interpreter_of_its_own_is_asked_by_the_engine(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    settings = [RESIDENT, "generate.engine='vllm'", "placement.python.generate='python'"]
    check_placement(load(tmp_path / "recipe.toml", settings))


# -- whole runs


REWARDS = """
import os, signal, time
from pathlib import Path


def evenness(completion_ids, **_):
    # The engine sleeps meanwhile: a file `kill` says that it is to be killed once, a file `wait`
    # that it is to be waited for long.
    if Path("kill").exists() and Path("events").exists():
        Path("kill").unlink()
        events = Path("events").read_text().splitlines()
        os.kill(int(events[-1].removeprefix("sleep ")), signal.SIGKILL)
    if Path("wait").exists():
        Path("wait").rename("waits")
        time.sleep(600)
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
"""
SETTINGS = (
    "data.held_out=null",
    "optimize.audit.enabled=false",
    "generate.engine='mine.py:Engine'",
)


def write(folder: Path) -> Path:
    write_recipe(folder)
    (folder / "mine.py").write_text(ENGINE)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def command(iterations: int, *settings: str) -> list[str]:
    settings = (f"iterations={iterations}", *SETTINGS, *settings)
    return ["run", "recipe.toml", *(f"--set={setting}" for setting in settings)]


def contents(folder: Path, iterations: int) -> dict[str, tuple[str, str]]:
    """Key and content of each version of the first iterations; those of updates hold seconds."""
    return {
        str(version.ref): (version.manifest.run_key, version.manifest.content_hash)
        for version in Store(folder / "store").versions()
        if version.ref.version <= iterations and version.ref.kind != "updates"
    }


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Path:
    """A run of four iterations with an engine that stays."""
    folder = write(tmp_path_factory.mktemp("four"))
    quiver(folder, *command(4, RESIDENT))
    return folder


@pytest.mark.prefect
def test_four_iterations_start_one_engine(four):
    assert events(four) == ["start", "sleep", *["take", "sleep"] * 3, "close"]
    assert not left_behind(four)


@pytest.mark.prefect
def test_fresh_engines_make_the_same(four, tmp_path):
    folder = write(tmp_path / "fresh")
    quiver(folder, *command(2))
    assert events(folder) == ["start", "close"] * 2
    assert contents(folder, 2) == contents(four, 2)
    assert len(contents(folder, 2)) == 11


@pytest.mark.slow
@pytest.mark.prefect
def test_a_flow_that_is_killed_leaves_no_sleeper_and_a_sleeper_that_is_killed_costs_one_start(
    four, tmp_path
):
    folder = write(tmp_path / "killed")
    (folder / "wait").touch()
    running = subprocess.Popen(
        [sys.executable, "-m", "quiver.flows.cli", *command(3, RESIDENT)],
        cwd=folder,
        env=command_environment(folder),
        start_new_session=True,
    )
    while not (folder / "waits").exists():
        assert running.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    assert events(folder) == ["start", "sleep"]
    assert Path(f"/proc/{pids(folder)[0]}").exists()
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(30)
    assert left_behind(folder) == []
    assert not Path(f"/proc/{pids(folder)[0]}").exists()
    (folder / "events").unlink()
    (folder / "kill").touch()
    quiver(folder, *command(3, RESIDENT))  # its first rollouts are there already
    assert events(folder) == ["start", "sleep", "start", "sleep", "close"]
    assert contents(folder, 3) == contents(four, 3)
