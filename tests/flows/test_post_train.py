"""The main flow through the command line: a tiny model, real stages in child processes, Prefect's
embedded server."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quiver.flows.cli.summary import next_commands
from quiver.flows.recipe import load
from quiver.flows.verification import verify
from quiver.stages.core.store import Store
from tests.flows.conftest import (
    called,
    command_environment,
    left_behind,
    options,
    quiver,
    shared_api,
    started,
    write_recipe,
)
from tests.flows.test_embedded import SCRIPTED

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def result(workplace) -> dict:
    settings = ("optimize.trackers=['tensorboard']", "optimize.tracker_folder=logs")
    return quiver(workplace, "run", "recipe.toml", *(f"--set={setting}" for setting in settings))


def names(store: Store) -> set[str]:
    return {str(version.ref) for version in store.versions()}


def test_the_contract_of_run(workplace, result):
    assert result["run"] == "tiny"
    assert [done["iteration"] for done in result["iterations"]] == [1, 2]
    assert [done["policy"] for done in result["iterations"]] == ["tiny/policy@1", "tiny/policy@2"]
    store = Store(workplace / "store")
    for done in result["iterations"]:
        rollouts = store.open(done["rollouts"])
        assert rollouts.manifest.rows == 16
        assert rollouts.manifest.input("prompts").ref == done["prompts"]
        rewards = store.open(done["rewards"]).table()["reward"].to_pylist()
        assert done["reward_mean"] == pytest.approx(sum(rewards) / 16, abs=1e-6)
        assert set(done["seconds"]) >= {"prompt", "generate", "reward", "optimize"}
    last = result["iterations"][-1]["evaluation"]
    assert last["n"] == last["baseline"]["n"] == 3
    assert last["stderr"] > 0
    assert store.open("tiny/rollouts@2").manifest.model("policy").ref == "tiny/policy@1"
    prompts = [
        set(store.open(done["prompts"]).table()["group_id"].to_pylist())
        for done in result["iterations"]
    ]
    assert prompts[0] | prompts[1] == {f"{row:06d}" for row in range(8)}, (
        "two iterations of four see all eight rows"
    )


def test_trackers_have_rewards_lengths_and_evaluations_at_the_step_of_the_policy(workplace, result):
    """Beside the numbers of the optimizer step that begins with it."""
    store = Store(workplace / "store")
    events = EventAccumulator(str(workplace / "logs" / f"tiny-{store.id[:8]}")).Reload()
    curves = {
        name: sorted((point.step, point.value) for point in events.Scalars(name))
        for name in events.Tags()["scalars"]
    }
    assert [step for step, _ in curves["loss"]] == [0, 1]
    expected = {"reward/mean": [], "completion_tokens/mean": [], "completion_tokens/truncated": []}
    for step, done in enumerate(result["iterations"]):
        rows = store.open(done["rollouts"]).table().to_pylist()
        lengths = [len(row["completion_ids"]) for row in rows]
        cut = [row["finish_reason"] == "length" for row in rows]
        expected["reward/mean"].append((step, done["reward_mean"]))
        mean = round(sum(lengths) / 16, 3)  # as the manifest has it
        expected["completion_tokens/mean"].append((step, mean))
        expected["completion_tokens/truncated"].append((step, sum(cut) / 16))
    expected["reward/parts/evenness"] = expected["reward/mean"]
    measured = [result["baseline"], result["iterations"][-1]["evaluation"]]
    for name in ("score", "stderr"):
        points = zip((0, 2), measured, strict=True)
        expected[f"evaluation/{name}"] = [(step, numbers[name]) for step, numbers in points]
    for name, points in expected.items():
        assert curves[name] == [(step, pytest.approx(value, abs=1e-6)) for step, value in points]


def test_again_is_already_done(workplace, result, tmp_path):
    """No new version, and no child: with an interpreter that cannot start, every stage still says
    "already done"."""
    before = names(Store(workplace / "store"))
    nowhere = [
        f"placement.python.{stage}='/bin/false'"
        for stage in ("policy", "prompt", "generate", "reward", "optimize")
    ]
    done = called(workplace, "run", "recipe.toml", "--json", *options(nowhere))
    assert names(Store(workplace / "store")) == before
    assert done.stderr.count("already done") == 1 + 4 + 2 * 4 + 4, done.stderr
    assert "made with other settings" not in done.stderr
    for each, before in zip(
        json.loads(done.stdout)["iterations"], result["iterations"], strict=True
    ):
        assert {**each, "seconds": ...} == {**before, "seconds": ...}


def test_the_next_commands_work_as_they_are_printed(workplace, result, monkeypatch):
    monkeypatch.chdir(workplace)
    settings = ["generate.rows_per_shard=7"]
    commands = next_commands(load("recipe.toml", settings), "recipe.toml", settings, result)
    assert len(commands) == 3
    named = [*settings, "store=store"]
    once = next_commands(load("recipe.toml", named), "recipe.toml", named, result)
    assert once == commands, "the store is named once"
    before = Store("store").numbers("tiny", "rollouts")
    for command in commands[:2]:
        runnable = command.replace("quiver ", f"{sys.executable} -m quiver.flows.cli.main ")
        env = command_environment(workplace)
        subprocess.run(runnable, shell=True, check=True, env=env, stdout=subprocess.DEVNULL)
    assert Store("store").numbers("tiny", "rollouts") == before
    assert "--iterations 4" in commands[2] and "generate.rows_per_shard=7" in commands[2]


def test_one_more_iteration_adds_only_itself(workplace, result):
    before = names(Store(workplace / "store"))
    longer = quiver(workplace, "run", "recipe.toml", "--iterations", "3")
    done = longer["iterations"][0]
    assert {**done, "seconds": ...} == {**result["iterations"][0], "seconds": ...}
    store = Store(workplace / "store")
    for stage, kind in (("generate", "rollouts"), ("optimize", "policy")):
        made_in = store.open(done[kind]).manifest.seconds["total"]
        assert done["seconds"][stage] == round(made_in, 3), "of the run that did the work"
    added = sorted(ref.partition("@")[0] for ref in names(Store(workplace / "store")) - before)
    kinds = ("advantages", "evaluations", "policy", "prompts", "rewards", "rollouts", "updates")
    assert added == ["tiny.eval/rewards", "tiny.eval/rollouts", *(f"tiny/{kind}" for kind in kinds)]


def test_an_error_of_a_stage_is_three_lines(workplace, result):
    """No traceback without --debug, whatever Prefect would log; the store is as it was."""
    files = Store(workplace / "store").open("tiny/rollouts@1").files
    path = files.path(files.names[0])
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    anew = ["--from", "reward", "--set", "data.held_out=null"]
    done = called(workplace, "run", "recipe.toml", *anew)
    path.write_bytes(good)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    lines = [line.split()[0] for line in done.stderr.splitlines()[-3:]]
    assert lines == ["E-CORRUPT", "State:", "Next:"]


def test_two_runs_of_one_recipe_at_once_make_everything_once(workplace):
    words, url = ("run", "recipe.toml", *SCRIPTED, "--set", "run=both"), shared_api()
    with ThreadPoolExecutor() as pool:
        answers = pool.map(lambda _: quiver(workplace, *words, PREFECT_API_URL=url), range(2))
    first, second = (answer["iterations"][0] for answer in answers)
    assert {**first, "seconds": ...} == {**second, "seconds": ...}
    store = Store(workplace / "store")
    for kind in ("prompts", "rollouts", "rewards", "advantages", "updates"):
        assert store.numbers("both", kind) == [1]
    assert store.numbers("both", "policy") == [0, 1] and verify(store)[1] == []


SLOW_GENERATION = [
    "--set", "iterations=1", "--set", "generate.rows_per_shard=2", "--set", "generate.samples_per_prompt=16",
    "--set", "generate.sampling.max_tokens=30", "--set", "generate.sampling.ignore_eos=true", "--set", "data.held_out=null",
]  # fmt: skip


def finished_shards(folder) -> dict[str, int]:
    """The shards of an unfinished rollouts version that are done, and when they were written."""
    work = folder / "store/tiny/rollouts/.work"
    written = {path.name: path.stat().st_mtime_ns for path in work.glob("*/part-*.arrow")}
    notes = [json.loads(path.read_bytes()) for path in work.glob("*.notes/*.json")]
    return {note["name"]: written[note["name"]] for note in notes}


def has_more_shards(work, so_far: int) -> bool:
    return len([*work.glob("*.notes/*.json")]) > so_far


def test_a_run_that_is_stopped_again_and_again_leaves_nobody_and_goes_on(tmp_path):
    """By Ctrl-C, `timeout` and kill -9 in turn. No finished shard is redone, and the rollouts are
    those of an uninterrupted generation.

    As a terminal and `timeout` do, SIGINT and SIGTERM reach the whole group; what is started in it
    must not die before the flow.
    """
    folder = write_recipe(tmp_path / "stopped")
    work, kept = folder / "store/tiny/rollouts/.work", {}
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        words = ("run", "recipe.toml", *SLOW_GENERATION)
        running = started(
            folder,
            *words,
            until=partial(has_more_shards, work, len(kept)),
            start_new_session=True,
        )
        if number == signal.SIGKILL:
            running.kill()
        else:
            os.killpg(running.pid, number)
        assert running.wait(30) == code
        assert left_behind(folder) == []
        finished = finished_shards(folder)
        assert len(finished) > len(kept) and kept.items() <= finished.items(), (
            "a finished shard was done again"
        )
        assert not Store(folder / "store").numbers("tiny", "rollouts")
        kept = finished
    done = quiver(folder, "run", "recipe.toml", *SLOW_GENERATION)["iterations"]
    assert [each["policy"] for each in done] == ["tiny/policy@1"]
    resumed = Store(folder / "store").open("tiny/rollouts@1")
    assert len(resumed.manifest.files) == 32
    for name, written in kept.items():
        assert (resumed.files.folder / name).stat().st_mtime_ns == written, (
            "a finished shard was done again"
        )
    options = ["--policy", "tiny/policy@0", "--force", *SLOW_GENERATION]
    again = quiver(folder, "generate", "recipe.toml", *options)
    assert (again["ref"], again["cached"]) == ("tiny/rollouts@2", False)
    whole = Store(folder / "store").open("tiny/rollouts@2").table()
    exact = [name for name in whole.column_names if name != "old_logprobs"]
    assert resumed.table().select(exact).equals(whole.select(exact))
    gaps = [abs(a - b) for x, y in zip(resumed.table()["old_logprobs"].to_pylist(), whole["old_logprobs"].to_pylist(), strict=True)
            for a, b in zip(x, y, strict=True)]  # fmt: skip
    assert max(gaps) < 1e-5, "equal but for rounding: a restart batches the rows differently"
