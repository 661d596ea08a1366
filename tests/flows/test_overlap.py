"""`overlap = 1`: the next iteration samples while this one optimizes. Who sampled what, and what
becomes of a stopped run."""

import os
import signal
import threading
import time
from functools import partial

import pytest

from quiver.flows.recipe import load
from quiver.flows.stopping import is_stopped, run_ahead
from quiver.schemas.errors import ConfigError
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call
from quiver.stages.core.run.stage_process import run_call
from quiver.stages.core.store import Store
from tests.flows.conftest import (
    left_behind,
    options,
    processes,
    quiver,
    started,
    write_recipe,
)

OVERLAP = ("overlap=1", "iterations=3", "optimize.max_staleness=1", "data.held_out=null")
OPTIONS = options(OVERLAP)


def test_a_stale_policy_must_be_allowed(recipe):
    for settings, said in (
        (["overlap=1"], ">= overlap = 1, got 0"),
        (["overlap=1", "optimize.replay=1"], "replay = 1 + overlap = 1"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(recipe, settings)
        assert said in caught.value.message
    with pytest.raises(ConfigError, match="overlap"):
        load(recipe, ["overlap=2", "optimize.max_staleness=2"])


def both_at_work(folder) -> bool:
    stages = {
        line.split("\0-m\0quiver.stages\0")[1].split("\0")[0]
        for line in processes(folder)
        if "\0-m\0quiver.stages\0" in line
    }
    return len(stages) == 2 and "optimize" in stages


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder in which a run was stopped twice (Ctrl-C, kill -9) while two stages were at work,
    and then came to its end."""
    folder = write_recipe(tmp_path_factory.mktemp("stopped"))
    words = ("run", "recipe.toml", *OPTIONS)
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        at_work = partial(both_at_work, folder)
        running = started(folder, *words, until=at_work, start_new_session=True)
        os.killpg(running.pid, number)
        assert running.wait(30) == code
        assert left_behind(folder) == []
        assert Store(folder / "store").numbers("tiny", "policy") == [0]
    return folder, quiver(folder, *words)["iterations"]


@pytest.mark.prefect
def test_who_sampled_what(stopped):
    """The first iteration is on-policy, each later one is a policy behind; nobody is left of a
    stopped run, and it goes on."""
    folder, done = stopped
    store = Store(folder / "store")
    sampled = [store.open(each["rollouts"]).manifest.model("policy").ref for each in done]
    assert sampled == ["tiny/policy@0", "tiny/policy@0", "tiny/policy@1"]
    for iteration, each in enumerate(done, 1):
        inputs = {entry.role: entry.ref for entry in store.open(each["policy"]).manifest.inputs}
        assert inputs == {
            "policy": f"tiny/policy@{iteration - 1}",
            "rollouts": f"tiny/rollouts@{iteration}",
            "rewards": f"tiny/rewards@{iteration}",
        }


@pytest.mark.slow
@pytest.mark.prefect
def test_an_undisturbed_run_makes_the_same(stopped, tmp_path):
    store, folder = Store(stopped[0] / "store"), write_recipe(tmp_path / "undisturbed")
    quiver(folder, "run", "recipe.toml", *OPTIONS)
    undisturbed = Store(folder / "store")
    assert {str(version.ref) for version in undisturbed.versions()} == {
        str(version.ref) for version in store.versions()
    }
    for ref in ("tiny/policy@3", "tiny/rollouts@3", "tiny/rewards@3"):
        assert store.open(ref).manifest.content_hash == undisturbed.open(ref).manifest.content_hash


def test_what_runs_ahead_ends_with_the_block(store, tmp_path):
    """A child that would sleep for minutes is ended as soon as the block is left by an error, which
    is the one that rises."""
    (tmp_path / "slow.py").write_text("import time\n\ndef prepare(folder):\n    time.sleep(600)\n")
    ended, model = threading.Event(), f"{tmp_path}/slow.py:prepare"

    def sleep() -> None:
        try:
            run_call(Call("policy", {"model": model}, store.url, into="slow"), stopped=is_stopped)
        except Stopped:
            ended.set()
            raise

    with pytest.raises(ZeroDivisionError), run_ahead(sleep):
        time.sleep(0.2)
        raise ZeroDivisionError
    assert ended.is_set()


def test_an_error_ahead_rises_where_the_result_is_wanted():
    def fail() -> None:
        raise ConfigError("source", "is missing")

    with run_ahead(fail) as ahead, pytest.raises(ConfigError):
        ahead.result()
