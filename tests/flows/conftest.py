"""A tiny recipe for the flows: a tiny llama, eight questions in a JSONL file, the transformers
engine."""

import atexit
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import prefect
import pytest
from filelock import FileLock
from prefect.settings import PREFECT_API_URL, temporary_settings

from quiver.flows.cli import main as cli
from quiver.flows.cli import shared
from quiver.flows.cli.next_step import Called
from quiver.stages.core.run import runner
from tests.tiny import make_folder
from tests.writing import write_lines

ROOT = Path(__file__).parents[2]
RECIPE = """
run = "tiny"
store = "store"
iterations = 2
seed = 7

[policy]
model = "model"

[data]
source = "questions.jsonl"
prompt = "question"
limit = 4
[data.held_out]
source = "held_out.jsonl"
limit = 3

[generate]
engine = "transformers"
samples_per_prompt = 4
[generate.sampling]
max_tokens = 6

[reward]
[[reward.functions]]
use = "rewards.py:evenness"

[optimize]
learning_rate = 1e-3
"""
REWARDS = '''
def evenness(completion_ids, answer, **_):
    """Share of even token ids; `answer` shows that columns arrive."""
    assert all(isinstance(value, int) for value in answer)
    return [sum(t % 2 == 0 for t in ids) / len(ids) for ids in completion_ids]
'''


def write_recipe(folder: Path) -> Path:
    """The recipe with all that it names, and a home for Prefect."""
    folder.mkdir(exist_ok=True)
    make_folder(folder / "model")
    shutil.copytree(_first_home(), folder / "prefect")
    for name, numbers in (("questions", range(8)), ("held_out", range(8, 12))):
        rows = [{"question": f"What is {a} plus 5?", "answer": a + 5} for a in numbers]
        write_lines(folder / f"{name}.jsonl", rows)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "recipe.toml").write_text(RECIPE)
    return folder


@cache
def _first_home() -> Path:
    """A home with the database that Prefect's first start makes, table by table, in half the time
    of a run; for copies of it. It is kept for the next run of the tests."""
    home = ROOT / ".pytest_cache" / f"prefect-{prefect.__version__}"
    home.parent.mkdir(exist_ok=True)
    with FileLock(f"{home}.lock"):
        if not (home / "is-complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "--yes"]
            env = {**os.environ, "PREFECT_HOME": str(home)}
            subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
            (home / "is-complete").touch()
    return home


@cache
def shared_api() -> str:
    """The API of one Prefect server for all tests of this process; it ends with the process. It
    schedules nothing: its tests have no deployments, and its loops would poll all the time."""
    from tests.deployments.prefect_world import World  # it imports this module

    home = Path(tempfile.mkdtemp(prefix="quiver-server."))
    shutil.copytree(_first_home(), home / "prefect")
    server = World(home)
    for name in ("SCHEDULER", "LATE_RUNS", "FOREMAN", "TRIGGERS"):
        server.env[f"PREFECT_SERVER_SERVICES_{name}_ENABLED"] = "false"
    server.start_server()
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    atexit.register(server.stop)
    return server.url


def command_line() -> list[str]:
    """The words that begin each command which a test starts as a process. They are asked for by the
    test, as the warm interpreter takes its place only after this module is imported."""
    return [sys.executable, "-m", "quiver.flows.cli.main"]


def command_environment(folder: Path) -> dict[str, str]:
    """The environment of a command in `folder`: a home for Prefect there, and the shared server."""
    url = shared_api()
    return {**own_home(folder), **({"PREFECT_API_URL": url} if url else {})}


def own_home(folder: Path) -> dict[str, str]:
    """The environment of a command in `folder` that starts Prefect's embedded server."""
    home = folder / "prefect"
    return {
        **os.environ,
        "PREFECT_HOME": str(home),
        "PREFECT_SERVER_MEMO_STORE_PATH": str(home / "memo_store.toml"),
        "PREFECT_RESULTS_LOCAL_STORAGE_PATH": str(home / "storage"),
    }


def called(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line that ran in `folder`."""
    has_server = "PREFECT_API_URL" in environment
    env = {**(own_home if has_server else command_environment)(folder), **environment}
    command = [*command_line(), *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def started(folder: Path, *words: str, until: Callable, **options) -> subprocess.Popen:
    """A command line that is running in `folder` when `until` comes about."""
    options = {"cwd": folder, "env": command_environment(folder), **options}
    running = subprocess.Popen([*command_line(), *words], **options)
    while not until():
        assert running.poll() is None, "it ended before it could be stopped"
        time.sleep(0.02)
    return running


def quiver(folder: Path, *arguments: str, code: int = 0, **environment: str) -> dict:
    """Run the command line in `folder` with --json; its exit code must be `code`. Returns the JSON
    object of stdout."""
    done = called(folder, *arguments, "--json", **environment)
    lines = done.stdout.splitlines()
    assert len(lines) == 1, (
        f"exit code {done.returncode}, stdout is not one line: {done.stdout}\n{done.stderr}"
    )
    answer = json.loads(lines[0])
    assert done.returncode == code, f"exit code {done.returncode}: {answer}"
    return answer


def options(settings: Iterable[str]) -> list[str]:
    """The words of a command that set these."""
    return [word for setting in settings for word in ("--set", setting)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def left_behind(folder: Path, only: str = "") -> list[str]:
    """Command lines of processes that belong to a run in `folder` (those that hold `only`), after
    at most 30 s."""
    deadline = time.monotonic() + 30
    while True:
        found = [line for line in processes(folder) if only in line]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def wait_until(comes_about: Callable[[], object]) -> None:
    """Wait for what must come about within a minute."""
    deadline = time.monotonic() + 60
    while not comes_about():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def processes(folder: Path) -> list[str]:
    """Command lines of the processes that belong to a run in `folder`, with NUL between their
    words."""
    marker, found = f"PREFECT_HOME={folder / 'prefect'}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "environ").read_bytes().split(b"\0") and process.name != str(
                os.getpid()
            ):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.fixture
def recipe(tmp_path) -> Path:
    """The recipe alone, in the test's own folder."""
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def in_json(monkeypatch) -> Callable[..., dict]:
    """A function that calls a command in this process as with --json, and returns its answer."""

    def call(command: Callable[..., None], *arguments, **options) -> dict:
        monkeypatch.setattr(shared, "_stdout", io.StringIO())
        command(*arguments, **options)
        return json.loads(shared._stdout.getvalue())

    return call


@pytest.fixture
def command(monkeypatch) -> Callable[..., tuple[int, dict]]:
    """A function that runs a command line with --json in this process; returns its exit code and
    its JSON object."""

    def call(*words: str) -> tuple[int, dict]:
        monkeypatch.setattr("sys.argv", ["quiver", *words, "--json"])
        monkeypatch.setattr(shared, "_stdout", io.StringIO())
        vars(shared.CALLED).update(vars(Called()))  # nothing is left of the command before
        try:
            code = cli._run()
        except SystemExit as end:
            code = end.code
        return code, json.loads(shared._stdout.getvalue())

    return call


QUICK = ["generate.engine='scripted'", "reward.workers=1"]
QUICK += ["optimize.audit.enabled=false"]  # the engine's logprobs are of no model


def stay_here(folder: Path, patch: pytest.MonkeyPatch, stages: list[str] | None = None) -> None:
    """Work in `folder`, and run the stages of flows in this process instead of children of it.
    Appends the names of those that are run, not found, to `stages`."""
    patch.chdir(folder)

    def run_call(call, **_):
        outcome = runner.find_or_make(call)
        if stages is not None:
            assert not outcome.cached
            stages.append(call.stage)
        return outcome

    for name, module in list(sys.modules.items()):
        if name.startswith("quiver.flows.") and hasattr(module, "run_call"):
            patch.setattr(module, "run_call", run_call)


@pytest.fixture
def embedded_server(monkeypatch):
    """Runs start Prefect's embedded server, as they do where PREFECT_API_URL names no other."""
    monkeypatch.setattr("tests.flows.conftest.shared_api", lambda: "")


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    """The API of the shared server, which flows that run in this process use, too."""
    with temporary_settings({PREFECT_API_URL: shared_api()}):
        yield shared_api()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with recipe, data, model and rewards; shared by the tests of a file, in their order."""
    return write_recipe(tmp_path_factory.mktemp("work"))
