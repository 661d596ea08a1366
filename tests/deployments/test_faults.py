"""Deployed runs on a real server with process workers, two on PostgreSQL and one on SQLite:
cancelled, and flow, worker and server killed by kill -9 in turn.

After each: no process of the run is left after 30 s, and the next run takes up the finished shards
by itself. At the end there is one version of everything. The faults run on PostgreSQL if
QUIVER_TEST_POSTGRES names one, else on SQLite; there Prefect's server spends minutes on waiting for
its own locks.
"""

import os
import signal
import uuid
from pathlib import Path

import httpx
import pytest
from prefect.client.schemas.objects import State, StateType
from prefect.exceptions import PrefectHTTPStatusError

from quiver.deployments.deploy import Where, deploy
from quiver.flows.recipe import load
from quiver.flows.verification import verify
from quiver.stages.core.store import Store
from tests.deployments.prefect_world import World, wait_for, world
from tests.flows.conftest import write_recipe

pytestmark = pytest.mark.prefect
DSN = os.environ.get("QUIVER_TEST_POSTGRES")
LONG = [
    "iterations=1", "data.held_out=null", "generate.rows_per_shard=2",
    "generate.sampling.max_tokens=60", "generate.sampling.ignore_eos=true",
]  # fmt: skip
POOL = "box"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def place(request, tmp_path_factory):
    """A server on this database, its workers, and a recipe in a folder."""
    if request.param == "postgresql" and not DSN:
        pytest.skip(
            "QUIVER_TEST_POSTGRES names no PostgreSQL, e.g. "
            "postgresql+asyncpg://user:password@127.0.0.1:5432/prefect"
        )
    folder = write_recipe(tmp_path_factory.mktemp(request.param))
    with world(folder, database=DSN if request.param == "postgresql" else None) as made:
        workers = ("first", "second") if made.database else ("first",)
        for name in workers:
            made.start_worker(POOL, name)
        with made.client() as client:
            wait_for("the workers", lambda: len(_online(client)) == len(workers))
        yield made


def _online(client) -> list[str]:
    try:
        return [
            worker.name
            for worker in client.read_workers_for_work_pool(POOL)
            if worker.status.value == "ONLINE"
        ]
    except PrefectHTTPStatusError:
        return []


class Runs:
    """Runs of one deployment, in one run of the store, that lasts long enough for its faults."""

    def __init__(self, place: World, client, name: str, samples: int = 64) -> None:
        self.place, self.client = place, client
        many = f"generate.samples_per_prompt={samples}"
        recipe = load("recipe.toml", [*LONG, many, f"run={name}"])
        (self.deployment,) = [
            client.read_deployment_by_name(d["name"])
            for d in deploy(recipe, Where(POOL))["deployments"]
        ]
        self.store, self.name = Store(place.folder / "store"), name

    def start(self) -> str:
        return str(self.client.create_flow_run_from_deployment(self.deployment.id).id)

    def state(self, run: str) -> StateType | None:
        """None while the server is gone."""
        try:
            return self.client.read_flow_run(uuid.UUID(run)).state.type
        except httpx.TransportError:
            return None

    def processes(self, run: str) -> list[int]:
        return self.place.processes(PREFECT__FLOW_RUN_ID=run)

    def flow(self, run: str) -> int:
        """The process that runs the flow: the one whose parent is a worker."""
        workers = {process.pid for process in self.place.running.values()}
        found = {pid: _parent(pid) for pid in self.processes(run)}
        flow = next((pid for pid, parent in found.items() if parent in workers), None)
        assert flow, (
            f"no flow among the processes {found} of {run}, which is {self.state(run)}; workers "
            f"{workers}\n{self.told()}"
        )
        return flow

    def told(self) -> str:
        """The last that server and workers said."""
        logs = sorted(self.place.folder.glob("*.log"))
        return "\n".join(f"-- {log.name}\n{log.read_text()[-3000:]}" for log in logs)

    def shards(self) -> int:
        return len([*(Path(self.store.url) / self.name / "rollouts/.work").glob("*.notes/*.json")])

    def into_the_middle(self) -> str:
        """A new run, at the moment when it has finished two more shards than those before it, and
        is not done with them."""
        before, run = self.shards(), self.start()
        wait_for("two more shards", lambda: self.shards() >= before + 2, pause=0.02)
        assert not self.store.numbers(self.name, "rollouts"), (
            "the run ended before it could be disturbed"
        )
        return run

    def nobody_left(self, run: str) -> None:
        wait_for(f"the processes of {run} to end", lambda: not self.processes(run), 30)

    def succeed(self) -> None:
        run = self.start()
        wait_for("the next run to complete", lambda: self.state(run) == StateType.COMPLETED)
        for kind, versions in {
            "prompts": [1],
            "rollouts": [1],
            "rewards": [1],
            "policy": [0, 1],
        }.items():
            assert self.store.numbers(self.name, kind) == versions, (
                f"{kind}: a version was made twice, or not at all"
            )
        assert verify(self.store)[1] == []


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def cancel(runs: Runs) -> None:
    run = runs.into_the_middle()
    runs.client.set_flow_run_state(uuid.UUID(run), State(type=StateType.CANCELLING))
    wait_for("the run to be cancelled", lambda: runs.state(run) == StateType.CANCELLED)
    runs.nobody_left(run)


def kill_flow(runs: Runs) -> None:
    run = runs.into_the_middle()
    os.kill(runs.flow(run), signal.SIGKILL)
    runs.nobody_left(run)
    wait_for("the worker to tell", lambda: runs.state(run) == StateType.CRASHED)


def kill_worker(runs: Runs) -> None:
    run = runs.into_the_middle()
    parent = _parent(runs.flow(run))
    name = next(name for name, process in runs.place.running.items() if process.pid == parent)
    runs.place.kill(name)
    runs.nobody_left(run)
    wait_for("the flow to tell", lambda: runs.state(run) == StateType.CRASHED)
    runs.place.start_worker(POOL, name)


def kill_server(runs: Runs) -> None:
    """The run goes on where it is; it must end and leave nobody, whatever it could tell."""
    run = runs.into_the_middle()
    runs.place.kill("server")
    runs.place.start_server()
    wait_for("the run to end", lambda: not runs.processes(run))


FAULTS = {"cancel": cancel, "flow": kill_flow, "worker": kill_worker, "server": kill_server}


def test_one_fault_after_another(place, monkeypatch):
    """Each run goes on where the one before was stopped; the last succeeds, and everything is there
    once."""
    monkeypatch.chdir(place.folder)
    with place.client() as client:
        # the database matters where the server is killed
        is_each = place.database or not DSN
        runs = Runs(place, client, "all", samples=64 if is_each else 16)
        for fault in FAULTS.values() if is_each else [kill_server]:
            fault(runs)
        runs.succeed()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_and_the_next_run(place, monkeypatch, fault, number):
    monkeypatch.chdir(place.folder)
    with place.client() as client:
        runs = Runs(place, client, f"{fault}-{number}")
        FAULTS[fault](runs)
        runs.succeed()
