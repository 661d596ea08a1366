"""The ways to run a recipe in deployments/docs/running.md, each as written, but for the port and the
name of the first host, which is this one."""

import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from prefect.client.schemas.filters import FlowFilter, FlowFilterName

from quiver.stages.core.store import Store
from tests.deployments.prefect_world import World, wait_for
from tests.flows.conftest import RECIPE, write_recipe

pytestmark = pytest.mark.prefect
RUNNING = (Path(__file__).parents[2] / "deployments/docs/running.md").read_text()
STAYS = re.compile(r"quiver serve|prefect worker|prefect server start")


def commands(heading: str) -> list[str]:
    (block,) = re.findall(rf"^### {heading}\n.*?^```\n(.*?)^```", RUNNING, re.MULTILINE | re.DOTALL)
    found = block.strip().splitlines()
    assert 1 <= len(found) <= 4
    return found


class Terminals:
    """Runs lines in `folder` as a person would who does what the document says: each in a terminal of
    its own, new as it was opened, in which the `export` line of the same block is typed first, and
    nothing else."""

    def __init__(self, folder: Path) -> None:
        self.world = World(write_recipe(folder))
        self.world.auth = (
            "me:secret"  # of the several hosts; a server without a password does not ask for one
        )
        short = RECIPE.replace("iterations = 2", "iterations = 1").replace(
            '[data.held_out]\nsource = "held_out.jsonl"\nlimit = 3\n', ""
        )
        (folder / "recipe.toml").write_text(short)
        env = self.world.env
        for name in ("PREFECT_API_URL", "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"):
            del env[name]
        env |= {
            "PREFECT_SERVER_API_PORT": str(self.world.port),
            "PATH": f"{Path(sys.executable).parent}:{env['PATH']}",
        }

    def type(self, line: str, export: str = "") -> None:
        stays, folder, env = STAYS.search(line), self.world.folder, self.world.env
        script = f"{export}\n{'exec env ' if stays else ''}{line}"
        command = [
            "bash",
            "-c",
            script.replace(":4200", f":{self.world.port}").replace("first-host", "127.0.0.1"),
        ]
        if stays:
            with (folder / "stays.log").open("ab") as log:
                self.world.running[line] = subprocess.Popen(
                    command, cwd=folder, env=env, stdout=log, stderr=log
                )
        else:
            done = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        if "prefect server" in line:
            wait_for("the server, which a person waits for too", self.healthy)
        if worker := re.search(r"prefect worker start --pool (\S+)", line):
            wait_for("the worker, which makes its pool", lambda: self.pooled(worker[1]))

    def healthy(self) -> bool:
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.world.url}/health", timeout=5, verify=False).status_code == 200
        return False

    def pooled(self, pool: str) -> bool:
        with self.world.client() as client:
            return pool in {each.name for each in client.read_work_pools()}

    def made(self, ref: str) -> bool:
        log = self.world.folder / "stays.log"
        assert all(process.poll() is None for process in self.world.running.values()), (
            log.read_text()[-3000:]
        )
        run, kind, version = re.split("[/@]", ref)
        store = self.world.folder / "store"
        return (store / run / kind).exists() and int(version) in Store(store).numbers(run, kind)


@pytest.fixture
def terminals(tmp_path):
    made = Terminals(tmp_path / "work")
    yield made
    made.world.stop()


@pytest.mark.parametrize(
    ("stop", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),
    ],
)
def test_a_laptop(terminals, stop, code):
    (line,) = commands("A laptop")
    terminals.type(line)
    wait_for("the policy", lambda: terminals.made("tiny/policy@1"))
    serving = terminals.world.running.pop(line)
    serving.send_signal(stop)
    assert serving.wait(60) == code
    wait_for(
        "all processes to end, the server among them", lambda: not terminals.world.processes(), 30
    )


def test_one_worker_and_then_every_night(terminals):
    export, *lines = commands("One worker")
    for line in lines:
        terminals.type(line, export)
    wait_for("the policy", lambda: terminals.made("tiny/policy@1"))
    export, line = commands("Every night")
    terminals.type(line, export)
    with terminals.world.client() as client:
        found = client.read_deployment_by_name("post-train/tiny")
    (schedule,) = [each.schedule for each in found.schedules]
    assert (schedule.cron, schedule.timezone) == ("0 2 * * *", "Europe/Berlin")
    assert found.concurrency_options.collision_strategy == "CANCEL_NEW"


def test_several_hosts(terminals):
    """Two workers, as if on two hosts, do generate and reward together."""
    export, server, worker, deploy = commands("Several hosts")
    for line in (server, worker, f"{worker} --name second", deploy):
        terminals.type(line, export)
    wait_for("the policy", lambda: terminals.made("tiny/policy@1"))
    with terminals.world.client() as client:
        runs = client.read_flow_runs(flow_filter=FlowFilter(name=FlowFilterName(any_=["stage"])))
    done = {run.name.split(" · ")[1].split()[0] for run in runs if run.state.is_completed()}
    assert done == {"generate", "reward"}
