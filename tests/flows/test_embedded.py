"""Prefect's embedded server dies before the run, or cannot start."""

import atexit
import contextlib
import importlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import threading
import time

import pytest
from prefect.context import refresh_global_settings_context

from quiver.flows.cli import embedded
from quiver.flows.cli.embedded import require_intact, require_writable
from quiver.flows.verification import verify
from quiver.schemas.errors import CorruptError, ResourceError
from quiver.stages.core.store import Store
from tests.faults import failing
from tests.flows.conftest import (
    called,
    left_behind,
    processes,
    quiver,
    started,
    write_recipe,
)

pytestmark = pytest.mark.usefixtures("embedded_server")
SCRIPTED = ["--set", 'generate.engine="scripted"', "--set", "iterations=1"]
SCRIPTED += ["--set", "optimize.audit.enabled=false"]  # its logprobs are of no model
SCRIPTED += ["--set", "data.held_out=null"]


@pytest.fixture
def place(tmp_path):
    return write_recipe(tmp_path / "work")


class ServerKiller(threading.Thread):
    """Kills every embedded server of the runs in a folder, `most` times at most; while it starts,
    or once the run has begun."""

    def __init__(self, folder, most: int, *, at_start: bool = False) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.most = most
        self.at_start = at_start
        self.killed: set[int] = set()
        self.is_over = threading.Event()

    def run(self) -> None:
        while len(self.killed) < self.most and not self.is_over.wait(0.1):
            for pid in server_pids(self.folder):
                has_begun = (self.folder / "store").exists()
                if pid not in self.killed and (self.at_start or has_begun):
                    os.kill(pid, signal.SIGKILL)
                    self.killed.add(pid)


def server_pids(folder) -> list[int]:
    pids = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{name}/environ", "rb") as file:
                home = f"PREFECT_HOME={folder / 'prefect'}".encode() in file.read().split(b"\0")
        except OSError:
            continue
        is_python = words[0].endswith((b"python", b"python3"))  # no keeper of it
        if home and is_python and b"uvicorn" in words[1:7]:
            pids.append(int(name))
    return pids


@pytest.mark.prefect
@pytest.mark.parametrize("at_start", [False, True])
def test_the_run_goes_on_with_a_new_server(place, at_start):
    killer = ServerKiller(place, most=1, at_start=at_start)
    killer.start()
    answer = quiver(place, "run", "recipe.toml", *SCRIPTED)
    killer.is_over.set()
    assert len(killer.killed) == 1, "it was not killed in time"
    assert answer["iterations"][0]["policy"] == "tiny/policy@1"
    assert processes(place) == []


@pytest.mark.prefect
def test_a_server_that_dies_again_and_again_ends_the_run_with_an_error(place):
    killer = ServerKiller(place, most=100)
    killer.start()
    answer = quiver(place, "run", "recipe.toml", *SCRIPTED, code=7)
    killer.is_over.set()
    assert "died 4 times" in answer["error"]["message"]
    assert "PREFECT_API_URL" in answer["error"]["next"]
    deadline = time.monotonic() + 30
    while processes(place) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes(place) == []


def test_deaths_of_the_server_are_seen_in_time_to_end_the_run_within_10_s():
    assert (embedded.MOST_DEATHS + 1) * embedded._POLL_SECONDS < 10


@pytest.mark.prefect
def test_a_home_that_can_not_be_written_is_told_in_one_line(place):
    (place / "file").touch()
    home = str(place / "file/home")
    done = called(place, "run", "recipe.toml", "--json", *SCRIPTED, PREFECT_HOME=home)
    assert done.returncode == 7 and "Traceback" not in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["object"] == f"PREFECT_HOME {place}/file/home"
    assert error["message"].endswith("Not a directory")


@pytest.mark.prefect
def test_the_runs_of_a_killed_shell_do_not_stay_running(place):
    (place / "rewards.py").write_text(
        "import time\n\ndef evenness(completion_ids, **_):\n    time.sleep(600)\n"
    )
    work = place / "store/tiny/rewards/.work"
    shell = started(place, "run", "recipe.toml", *SCRIPTED, until=lambda: list(work.glob("*")))
    shell.kill()
    shell.wait()
    assert states(place) == {"RUNNING"}
    (place / "rewards.py").write_text(
        "def evenness(completion_ids, **_):\n    return [1.0] * len(completion_ids)\n"
    )
    quiver(place, "run", "recipe.toml", *SCRIPTED)
    assert states(place) == {"COMPLETED", "CRASHED"}
    tasks = "task_run where flow_run_id in (select id from flow_run where state_type = 'CRASHED')"
    assert states(place, tasks) == {"COMPLETED", "CRASHED"}


def killed_without_its_database(place, failure: str) -> str:
    """A run that is killed at a place, whose server's database is lost, goes on; what it then
    says."""
    words = ("run", "recipe.toml", *SCRIPTED)
    done = called(place, *words, **failing.environment(failure))
    assert done.returncode in (-signal.SIGKILL, 7)
    assert left_behind(place) == []
    for path in (place / "prefect").glob("prefect.db*"):
        path.unlink()
    done = called(place, *words)
    assert done.returncode == 0, done.stderr
    store = Store(place / "store")
    for kind in ("prompts", "rollouts", "rewards"):
        assert store.numbers("tiny", kind) == [1]
    assert store.numbers("tiny", "policy") == [0, 1]
    assert verify(store)[1] == [] and states(place) == {"COMPLETED"}
    return done.stderr


@pytest.mark.prefect
def test_what_was_committed_and_never_reported_is_not_made_twice_without_prefects_database(place):
    """Rewards are committed, and the flow is killed before its task run reports so."""
    said = killed_without_its_database(place, "flow.answered@4:kill")
    assert said.count("already done") == 4 and re.search("reward 1/1 .* already done", said)


@pytest.mark.torture
@pytest.mark.prefect
@pytest.mark.parametrize(
    "failure",
    [*(f"flow.answered@{stage}:kill" for stage in range(1, 6)), "commit.renamed:kill"],
)
def test_a_run_goes_on_after_kill_9_and_without_the_database_of_before(
    place, record_property, failure
):
    killed_without_its_database(place, failure)
    record_property("runs killed, their database lost", 1)


def states(folder, runs="flow_run") -> set[str]:
    with contextlib.closing(sqlite3.connect(folder / "prefect/prefect.db")) as database:
        return {state for (state,) in database.execute(f"select state_type from {runs}")}


def start_first(home, answers) -> None:
    """Start the embedded server as a run does, in a fork; at the end stop it."""
    atexit._clear()
    os.environ["PREFECT_HOME"] = str(home)
    os.environ.pop("PREFECT_API_URL", None)
    refresh_global_settings_context()
    embedded.guard_embedded_server()
    answers.put("up")
    atexit._run_exitfuncs()


@pytest.mark.prefect
def test_two_first_runs_at_once_make_prefects_database_one_after_the_other(tmp_path):
    """Its migrations do not expect another at the same tables."""
    importlib.import_module("prefect.server.api.server")  # once, for both
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    arguments = (tmp_path / "new home", answers)
    starts = [context.Process(target=start_first, args=arguments) for _ in range(2)]
    for start in starts:
        start.start()
    for start in starts:
        start.join(300)
    assert [start.exitcode for start in starts] == [0, 0]
    assert [answers.get(), answers.get()] == ["up", "up"]


def test_a_home_without_room_for_a_database_is_told(tmp_path):
    """On a real disk of a megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not permitted here")
    try:
        with pytest.raises(ResourceError, match="No space left on device") as caught:
            require_writable(tmp_path / "prefect")
        assert "PREFECT_HOME" in caught.value.next
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.prefect
def test_a_database_that_is_damaged_is_told_before_the_server_starts(place):
    database = place / "prefect/prefect.db"
    database.write_bytes(bytes(range(256)) * 20)
    error = quiver(place, "run", "recipe.toml", *SCRIPTED, code=3)["error"]
    assert error["object"] == str(database) and "file is not a database" in error["message"]
    subprocess.run(shlex.split(error["next"]), check=True)
    require_intact(database)


def test_a_database_is_damaged_where_its_list_of_tables_can_not_be_read(tmp_path):
    database = tmp_path / "a folder" / "prefect.db"
    database.parent.mkdir()
    with contextlib.closing(sqlite3.connect(database)) as writer:
        writer.execute("create table runs (id)")
        writer.commit()
        writer.execute("begin exclusive")
        require_intact(database)  # locked by another process is no damage
    with database.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 400)
    with pytest.raises(CorruptError, match="malformed"):
        require_intact(database)


@pytest.mark.prefect
def test_an_embedded_server_that_does_not_answer_in_time_is_no_defect(place, monkeypatch):
    monkeypatch.setenv("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "1")
    error = quiver(place, "run", "recipe.toml", *SCRIPTED, code=7)["error"]
    assert "does not start: Timed out" in error["message"]
    assert "PREFECT_API_URL" in error["next"]
