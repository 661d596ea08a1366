"""A stage at which another process is at work alone is waited for: until that has finished, or is
dead."""

import json
import logging
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from quiver import run_stage
from quiver.flows import tasks
from quiver.flows.dispatch import run_at
from quiver.schemas.errors import BusyError
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call, Outcome
from tests.benchmarks.made import make_prompts, make_rollouts, tiny_policy

SLOW = """
import os, time

def once(completions, **_):
    open("begun", "w").close()
    while not os.path.exists("go"):
        time.sleep(0.02)
    return [1.0] * len(completions)
"""
HOLDER = """
import json, sys
from quiver.stages.core.run.call import Call
from quiver.stages.core.run.stage_process import run_call

run_call(Call.from_json(json.loads(sys.argv[1])))
"""


@pytest.fixture
def call(store, tmp_path, monkeypatch):
    """Scoring that another process is at: it waits for a file `go`."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    rollouts = make_rollouts(store, tiny_policy(store), 4, 8, 8, 2, asked=make_prompts(store, 2))
    config = {"functions": [{"use": "slow.py:once"}]}
    return Call("reward", config, store.url, {"rollouts": str(rollouts.ref)}, label="mine")


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    """Of those that share, with one that does not."""
    monkeypatch.setattr("quiver.stages.core.store.writer._JOIN_SECONDS", 0.1)


@pytest.fixture
def holder(call, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, json.dumps(call.to_json())])
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
            found.append(tasks.stage_task.fn(call, (), ()))
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
        run_at(call)
    assert caught.value.next == "wait for it, then run again"
    with pytest.raises(BusyError) as caught:
        run_stage("reward", call.config, call.store, in_process=True, **call.refs)
    assert caught.value.next == (
        "wait for it, then run again; or run all these calls with share=True, so that they share "
        "the work"
    )
    with pytest.raises(BusyError, match="is already doing this work alone") as caught:
        run_stage("reward", call.config, call.store, in_process=True, share=True, **call.refs)
    assert "share" not in caught.value.next, "it is asked for already"
    (tmp_path / "go").touch()


@pytest.mark.parametrize("end", ["finishes", "is killed"])
def test_who_comes_second_gets_what_there_is_or_goes_on(call, holder, caplog, tmp_path, end):
    with pytest.raises(BusyError):
        run_at(call)  # a shell command is told at once
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
    monkeypatch.setattr(tasks, "is_stopped", wanted.is_set)
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
    monkeypatch.setattr(tasks, "time", clock)
    done = Outcome("a/rewards@1", True, 4, 70.0, {})
    monkeypatch.setattr(tasks, "find_outcome", lambda _: done if now[0] >= 70 else None)

    def run(*_, **__):
        if now[0] < 70:
            raise BusyError("a/rewards", "another process is at it")
        return done

    monkeypatch.setattr(tasks, "run_at", run)
    assert tasks.stage_task.fn(call, (), ()) == done and now[0] < 72
