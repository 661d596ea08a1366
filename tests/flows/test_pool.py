"""Stages on a work pool, against a real Prefect server with a process worker: found, shared,
failed, waited for, cancelled."""

import json
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import replace
from uuid import uuid4

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.flows import EntrypointType

from quiver.flows import pool
from quiver.flows.placement import GivenUp
from quiver.flows.stage import require_store, stage
from quiver.flows.stopping import run_ahead
from quiver.schemas.errors import ConfigError, NumericError, ResourceError
from quiver.stages.core.run.call import Call, Where
from quiver.stages.core.store import Store
from tests.flows.conftest import (
    QUICK,
    command_environment,
    left_behind,
    options,
    quiver,
    shared_api,
    started,
    wait_until,
)

pytestmark = pytest.mark.prefect
WORKER = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_RUNNER_POLL_FREQUENCY": "1"}


@pytest.fixture(scope="module")
def place(workplace, api):
    """A folder with a recipe, and a server with the pools `box` (one worker) and `nobody`
    (none)."""
    with get_client(sync_client=True) as client:
        for name in ("box", "nobody"):
            make_pool(client, name, job_variables={"working_dir": str(workplace)})
    environment = {**command_environment(workplace), **WORKER}
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "box", "--name", "one"]
    worker = subprocess.Popen(
        command,
        env=environment,
        cwd=workplace,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not _post("work_pools/box/workers/filter"):
            assert worker.poll() is None, "the worker ended"
            time.sleep(0.1)
        yield workplace
    finally:
        worker.terminate()
        worker.wait(30)


def make_pool(client, name: str, **options) -> None:
    """A pool for processes, and the deployment of a stage in it."""
    client.create_work_pool(WorkPoolCreate(name=name, type="process"))
    options["entrypoint_type"] = EntrypointType.MODULE_PATH
    stage.to_deployment(name, work_pool_name=name, **options).apply()


def _post(path: str) -> list[dict]:
    url = f"{shared_api()}/{path}"
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=10).read())


def pool_runs() -> list[dict]:
    """The flow runs that the pools of this file were asked for."""
    runs = _post("flow_runs/filter")
    return [run for run in runs if run["work_pool_name"] in ("box", "nobody")]


def on_pool(folder, *settings: str) -> list[str]:
    given = (f"store={str(folder / 'store')!r}", "data.held_out=null", "iterations=1", *settings)
    return options(given)


def test_the_stage_s_own_error_comes_back(place):
    long = ("prompt.overlong='error'", "prompt.max_prompt_tokens=3")
    here = quiver(place, "prompt", "recipe.toml", *on_pool(place, *long), code=2)["error"]
    arguments = ["prompt", "recipe.toml", *on_pool(place, "placement.prompt=box", *long)]
    error = quiver(place, *arguments, code=2)["error"]
    assert error == {**here, "state": "nothing was changed."}, "the first one has made the policy"
    assert "3 tokens are allowed" in error["message"]
    (run,) = pool_runs()
    assert (run["name"], run["work_pool_name"]) == ("tiny · prompt", "box")


def test_nobody_takes_it_up(place):
    arguments = [
        "prompt",
        "recipe.toml",
        *on_pool(place, "placement.prompt=nobody", "placement.wait_seconds=1", "seed=9"),
    ]
    error = quiver(place, *arguments, code=7)["error"]
    assert (error["object"], error["next"]) == ("pool nobody", "prefect worker start --pool nobody")
    assert {run["state_type"] for run in pool_runs() if run["work_pool_name"] == "nobody"} == {
        "CANCELLED"
    }


def test_a_pool_without_a_deployment_is_told(place):
    error = quiver(
        place, "prompt", "recipe.toml", *on_pool(place, "placement.prompt=other", "seed=9"), code=2
    )["error"]
    assert "other" in error["object"] and error["next"].startswith(
        "quiver deploy recipe.toml --pool other "
    )


def test_another_store_at_the_same_path_is_refused(store, tmp_path):
    asking = Where(store_id="that of the host that asks")
    call = Call("prompt", {}, store.url, where=asking)
    with pytest.raises(ConfigError, match="another store"):
        require_store(call)
    with pytest.raises(ConfigError, match="no store here"):
        require_store(replace(call, store=tmp_path / "not mounted"))
    assert not (tmp_path / "not mounted").exists()


def test_a_whole_run_with_two_calls_that_share(place):
    """Generation in the pool as two flow runs: when one has done it, the stage is done, and there
    is one version, which is found after that."""
    settings = on_pool(place, "placement.generate=box", "placement.fan_out=2", *QUICK)
    done = quiver(place, "run", "recipe.toml", *settings)["iterations"][0]
    assert (done["rollouts"], done["policy"]) == ("tiny/rollouts@1", "tiny/policy@1")
    runs = [run for run in pool_runs() if "stage:generate" in run["tags"]]
    assert {run["name"] for run in runs} == {
        "tiny · generate 1/1 (1 of 2)",
        "tiny · generate 1/1 (2 of 2)",
    }
    assert {"run:tiny", "stage:generate", "iteration:1"} <= set(runs[0]["tags"])
    assert "COMPLETED" in {run["state_type"] for run in runs}
    assert Store(place / "store").numbers("tiny", "rollouts") == [1]
    num_runs = len(pool_runs())
    again = quiver(place, "generate", "recipe.toml", *settings, "--policy", "tiny/policy@0")
    assert (again["ref"], again["cached"], again["rows"]) == ("tiny/rollouts@1", True, 16)
    assert len(pool_runs()) == num_runs


@pytest.mark.slow
def test_ctrl_c_ends_the_stage_on_the_worker(place):
    slow = (
        "generate.rows_per_shard=2",
        "generate.sampling.max_tokens=200",
        "generate.sampling.ignore_eos=true",
        "seed=3",
    )
    arguments = ["run", "recipe.toml", *on_pool(place, "placement.generate=box", *slow)]
    notes = "store/tiny/rollouts/.work/*.notes/*.json"
    running = started(place, *arguments, until=lambda: list(place.glob(notes)))
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130
    assert left_behind(place, "-m\0quiver.stages\0generate") == []
    states = {run["state_type"] for run in pool_runs() if run["work_pool_name"] == "box"}
    assert states & {"CANCELLING", "CANCELLED"} and not states & {"RUNNING", "PENDING", "SCHEDULED"}


# -- the test itself does what a worker does


class Pool:
    """A pool whose flow runs the test moves from state to state, and one call of a stage there."""

    def __init__(self, client, store: Store) -> None:
        self.name = f"hand-{uuid4()}"
        self.call = Call("generate", {}, store.url)
        self._client = client
        make_pool(client, self.name)

    def run(self, **where):
        """The call, made in a thread of its own."""
        call = replace(self.call, where=Where(pool=self.name, **where))
        return run_ahead(lambda: pool.run_in_pool(call))

    def runs(self) -> list[FlowRun]:
        """Its flow runs, by their names."""
        name = WorkPoolFilterName(any_=[self.name])
        runs = self._client.read_flow_runs(work_pool_filter=WorkPoolFilter(name=name))
        return sorted(runs, key=lambda run: run.name)

    def started(self, count: int) -> list[FlowRun]:
        """The same, when there are so many."""
        wait_until(lambda: len(self.runs()) >= count)
        return self.runs()

    def move(self, run: FlowRun, kind: str, message: str = "") -> None:
        """What a worker, or the flow in it, tells the server."""
        state = State(type=StateType[kind], message=message)
        self._client.set_flow_run_state(run.id, state, force=True)

    def come_online(self, worker: str) -> None:
        """A worker is there."""
        self._client.send_worker_heartbeat(self.name, worker, 60)

    def pause(self) -> None:
        """No worker gets a run any more."""
        self._client.update_work_pool(self.name, WorkPoolUpdate(is_paused=True))

    def forget(self, run: FlowRun) -> None:
        """The server loses a run."""
        self._client.delete_flow_run(run.id)


@pytest.fixture
def by_hand(api, store, monkeypatch):
    """A pool without workers; its store is `store`."""
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.05)
    with get_client(sync_client=True) as client:
        yield Pool(client, store)


DONE = 'tiny/policy@0\n{"ref": "tiny/policy@0", "cached": false}'
DIVERGED = json.dumps({"error": NumericError("generate", "a NaN").to_dict()})


def test_the_first_that_is_done_ends_the_others(by_hand, policy):
    with by_hand.run(workers=3, wait_seconds=600) as call:
        first, second, third = by_hand.started(3)
        assert [run.name for run in (first, second)] == ["stage (1 of 3)", "stage (2 of 3)"]
        by_hand.move(first, "CRASHED")
        by_hand.move(third, "RUNNING")
        by_hand.move(second, "COMPLETED", DONE)
        outcome = call.result(60)
    assert (outcome.ref, outcome.cached) == ("tiny/policy@0", False)
    kinds = [run.state_type for run in by_hand.runs()]
    assert kinds == [StateType.CRASHED, StateType.COMPLETED, StateType.CANCELLING]


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        ((("FAILED", DIVERGED), ("CRASHED", "")), NumericError, "a NaN"),
        ((("CRASHED", ""), ("FAILED", DIVERGED)), NumericError, "a NaN"),
        ((("CANCELLED", ""),), GivenUp, "was cancelled"),
        ((("CRASHED", "out of memory"),), ResourceError, "ended as Crashed: out of memory"),
        ((("COMPLETED", ""),), ResourceError, "ended as Completed: no message"),
    ],
)
def test_where_all_have_failed_an_error_says_more_than_a_crash(by_hand, kinds, error, message):
    with by_hand.run(workers=len(kinds), wait_seconds=600) as call:
        for run, (kind, text) in zip(by_hand.started(len(kinds)), kinds, strict=True):
            by_hand.move(run, kind, text)
        with pytest.raises(error, match=message) as caught:
            call.result(60)
    assert type(caught.value) is error


def test_a_run_that_the_server_lost_has_crashed(by_hand, policy, caplog, monkeypatch):
    """While the server deletes a run, it may answer with the run, and without its state."""
    read, known, without_state = SyncPrefectClient.read_flow_runs, {}, []

    def read_meanwhile(client, flow_run_filter=None, **options):
        runs = read(client, flow_run_filter=flow_run_filter, **options)
        if flow_run_filter:
            known.update({run.id: run for run in runs})
            for run_id in known.keys() - {run.id for run in runs}:
                if len(without_state) < 3:
                    without_state.append(known[run_id].model_copy(update={"state": None}))
                    runs.append(without_state[-1])
        return runs

    monkeypatch.setattr(SyncPrefectClient, "read_flow_runs", read_meanwhile)
    with by_hand.run(workers=3, wait_seconds=600) as call:
        first, second, third = by_hand.started(3)
        by_hand.move(first, "CRASHED", "killed")
        wait_until(lambda: "(1 of 3)' ended as Crashed: killed" in caplog.text)
        by_hand.forget(second)
        said = "(2 of 3)' ended as Crashed: the server does not know it"
        wait_until(lambda: said in caplog.text)
        by_hand.move(third, "COMPLETED", DONE)
        assert call.result(60).ref == "tiny/policy@0"
    assert len(without_state) == 3


def test_a_run_that_is_taken_up_and_not_begun_has_failed(by_hand):
    by_hand.come_online("slow")
    with by_hand.run(workers=1, wait_seconds=0.5) as call:
        by_hand.move(*by_hand.started(1), "PENDING")
        with pytest.raises(ResourceError, match=r"'stage' but did not start it within 0\.5"):
            call.result(60)
    assert [run.state_type for run in by_hand.runs()] == [StateType.CANCELLING]


@pytest.mark.parametrize(
    ("workers", "shares", "count"), [(0, True, 1), (1, True, 1), (2, True, 2), (2, False, 1)]
)
def test_there_are_as_many_runs_as_workers_where_they_can_share(
    by_hand, policy, workers, shares, count
):
    for number in range(workers):
        by_hand.come_online(f"worker {number}")
    by_hand.call = replace(by_hand.call, force=not shares, label="work")
    with by_hand.run(wait_seconds=600) as call:
        for run in by_hand.started(count):
            by_hand.move(run, "COMPLETED", DONE)
        call.result(60)
    named = [f"work ({number} of {count})" for number in range(1, count + 1)]
    assert [run.name for run in by_hand.runs()] == (["work"] if count == 1 else named)


def test_a_worker_that_is_busy_is_waited_for_until_its_pool_is_paused(by_hand, caplog):
    by_hand.come_online("busy")
    with by_hand.run(wait_seconds=0.2) as call:
        wait_until(lambda: "waits for a free worker" in caplog.text)
        assert not call.done() and f"pool {by_hand.name}: busy" in caplog.text
        by_hand.pause()
        with pytest.raises(GivenUp, match="it is paused") as caught:
            call.result(60)
    assert caught.value.next == f"prefect work-pool resume {by_hand.name}"


def test_a_pool_that_the_server_lacks_is_told(by_hand):
    by_hand.name = "nowhere"
    with by_hand.run() as call, pytest.raises(ConfigError, match="no such work pool") as caught:
        call.result(60)
    assert caught.value.next == "quiver deploy RECIPE --pool nowhere"
