"""A command that is told to stop ends in time and leaves nobody behind; see `test_post_train` for
what it finds when it is started again."""

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quiver.flows import stopping
from quiver.flows.verification import verify
from quiver.stages.core.processes import keeper, subprocesses
from quiver.stages.core.store import Store
from tests.faults.failing import environment
from tests.flows.conftest import (
    command_environment,
    left_behind,
    options,
    quiver,
    started,
    wait_until,
    write_recipe,
)
from tests.flows.test_embedded import SCRIPTED

COMMAND = """
import ctypes, sys, time
from quiver.flows import stopping
libc, mutex = ctypes.CDLL(None), bytes(64)
libc.pthread_mutex_lock(mutex)
stopping.STOP_SECONDS = float(sys.argv[1])
stopping.watch_signals()
try:
    try:
        print("ready", flush=True)
        {work}
    finally:
        print("unwinds", flush=True)
        {cleanup}
except KeyboardInterrupt:
    sys.exit(130)
finally:
    stopping.leave_if_told()
"""
WAITS = "time.sleep(600)"
IN_C = "libc.pthread_mutex_lock(mutex)"  # waits without end, and no handler of Python's runs there


def command(work: str, cleanup: str = "pass", stop_seconds: float = 600) -> subprocess.Popen:
    code = COMMAND.format(work=work, cleanup=cleanup)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(stop_seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


def sleeps(process: subprocess.Popen) -> bool:
    """Whether its main thread waits, for a tenth of a second."""
    stat = Path(f"/proc/{process.pid}/stat")
    for _ in range(5):
        time.sleep(0.02)
        if stat.read_text().rpartition(")")[2].split()[0] != "S":
            return False
    return True


def ending(process: subprocess.Popen) -> tuple[int, str, str]:
    """Its exit code, and what else it said on stdout and stderr."""
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr.rpartition("quiver ")[2].partition(":")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_unwinds_the_command(number):
    process = command(WAITS)
    process.send_signal(number)
    code, stdout, _ = ending(process)
    assert (code, stdout) == (128 + number, "unwinds\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_it_at_once(number):
    process = command(WAITS, cleanup=IN_C)
    process.send_signal(number)
    assert process.stdout.readline() == "unwinds\n"
    time.sleep(1)
    process.send_signal(number)
    assert ending(process) == (128 + number, "", "got a second signal to stop")


@pytest.mark.parametrize("seconds", [600, 1])
def test_a_command_that_is_in_c_code_ends_at_the_second_signal_or_when_its_time_is_over(seconds):
    process = command(IN_C, stop_seconds=seconds)
    wait_until(lambda: sleeps(process))  # it is there
    process.send_signal(signal.SIGTERM)
    if seconds == 600:
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
    why = "got a second signal to stop" if seconds == 600 else "did not stop within 1 s"
    assert ending(process) == (143, "", why)


def test_a_signal_to_the_command_and_to_its_group_is_one():
    """`timeout` sends both."""
    process = command(WAITS, cleanup="time.sleep(2); print('unwound')")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert ending(process)[:2] == (143, "unwinds\nunwound\n")


def test_what_a_command_says_at_its_very_end_is_still_said():
    process = command(WAITS, cleanup="import atexit; atexit.register(print, 'bye')")
    process.send_signal(signal.SIGTERM)
    assert ending(process)[:2] == (143, "unwinds\nbye\n")


def test_a_stage_that_ignores_sigterm_is_killed_before_the_command_runs_out_of_its_10_s():
    to_kill_a_stage = subprocesses.GRACE_SECONDS + keeper._LAST_SECONDS
    assert to_kill_a_stage < stopping.STOP_SECONDS < 10


# -- with all that it started

ENGINE = """
import os, signal, subprocess, sys, time

class Engine:
    def __init__(self, *arguments, **options):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        open("begun", "w").close()
        time.sleep(600)
"""
REWARDS = """
import os, signal, time

def evenness(completion_ids, **_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    open("begun", "w").close()
    time.sleep(600)
"""


def begun(
    folder, *settings: str, file: str = "begun", command: tuple[str, ...] = ("run",)
) -> subprocess.Popen:
    """A run (or another command) that has come to what `file` says."""
    words = (*command, "recipe.toml", *SCRIPTED, *options(settings))
    pipe = {"stderr": subprocess.PIPE, "text": True}
    return started(folder, *words, until=lambda: list(folder.glob(file)), **pipe)


def ended(running: subprocess.Popen, folder) -> tuple[int, bool, list[str]]:
    """Its exit code, whether it ended in order, and who is left."""
    _, stderr = running.communicate(timeout=120)
    return running.returncode, "it ends at once" not in stderr, left_behind(folder)


@pytest.mark.prefect
def test_the_second_signal_ends_an_engine_and_the_embedded_server_too(embedded_server, tmp_path):
    folder = write_recipe(tmp_path / "work")
    (folder / "my_engine.py").write_text(ENGINE)
    running = begun(folder, 'generate.engine="my_engine.py:Engine"')
    running.terminate()
    time.sleep(1)
    running.terminate()
    assert ended(running, folder) == (143, False, [])


def test_a_reward_worker_that_ignores_sigterm_ends_with_the_command(workplace):
    (workplace / "rewards.py").write_text(REWARDS)
    running = begun(workplace)
    running.terminate()
    assert ended(running, workplace) == (143, True, [])


def test_a_stage_in_the_middle_of_a_step_ends_with_the_command(workplace):
    (workplace / "rewards.py").write_text(
        "def evenness(completion_ids, **_):\n    return [float(len(i)) for i in completion_ids]\n"
    )
    steps = "store/tiny/policy/.work/*"
    running = begun(workplace, "optimize.epochs=1000000", file=steps)
    time.sleep(1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=120)
    assert (running.returncode, left_behind(workplace)) == (130, [])
    *_, kept, next_step = stderr.splitlines()
    assert re.fullmatch(
        r"stopped; (\d new versions? and )?"
        r"the finished shards of unfinished versions are kept",
        kept,
    )
    command = shlex.split(next_step.removeprefix("to continue: "))
    assert command == ["quiver", *running.args[3:]]


def test_a_check_that_is_stopped_does_not_say_that_something_is_kept(workplace):
    (workplace / "base.py").write_text(
        "import pathlib, time\n\n"
        "def make(folder):\n    pathlib.Path('making').touch()\n    time.sleep(600)\n"
    )
    settings = ["policy.model='base.py:make'", "run='other'"]
    running = begun(workplace, *settings, file="making", command=("check", "--show"))
    running.terminate()
    _, stderr = running.communicate(timeout=120)
    assert running.returncode == 143
    assert stderr.splitlines()[-1] == "stopped"


@pytest.mark.parametrize("place", ["commit.staged", "commit.renamed"])
def test_a_commit_that_is_stopped_is_none_or_whole(workplace, place):
    """And the same command ends well after it."""
    run = place.replace(".", "-")
    words = ["prompt", "recipe.toml", f"--set=run={run}"]
    reached = workplace / f"{run}.reached"
    env = command_environment(workplace) | environment(f"{place}:sleep=600", reached)
    pipe = {"env": env, "stderr": subprocess.PIPE, "text": True}
    running = started(workplace, *words, until=reached.exists, **pipe)
    running.terminate()
    assert ended(running, workplace) == (143, True, [])
    answer = quiver(workplace, *words)
    store = Store(workplace / "store")
    assert answer["ref"] == f"{run}/prompts@1"
    assert store.numbers(run, "policy") == [0] and store.numbers(run, "prompts") == [1]
    assert verify(store)[1] == []
