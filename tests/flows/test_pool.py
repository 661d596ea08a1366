"""Stages on a work pool, against a real Prefect server with a process worker: found, shared,
failed, waited for, cancelled."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from quiver.stages.common.store import Store
from tests.flows.conftest import command_environment, left_behind, quiver, shared_api

pytestmark = pytest.mark.prefect
WORKER = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
DEPLOY = (
    "import os, sys; from prefect.client.orchestration import get_client\n"
    "from prefect.client.schemas.actions import WorkPoolCreate\n"
    "from prefect.flows import EntrypointType; from quiver.flows.stage import stage\n"
    "with get_client(sync_client=True) as client:\n"
    "    for pool in sys.argv[1:]:\n"
    "        client.create_work_pool(WorkPoolCreate(name=pool, type='process'))\n"
    "        stage.to_deployment(pool, work_pool_name=pool, "
    "entrypoint_type=EntrypointType.MODULE_PATH,\n"
    "            job_variables={'working_dir': os.getcwd()}).apply()\n"
)


@pytest.fixture(scope="module")
def place(workplace):
    """A folder with a recipe, and a server with the pools `box` (one worker) and `nobody`
    (none)."""
    environment = {
        **command_environment(workplace),
        **WORKER,
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run(
        [sys.executable, "-c", DEPLOY, "box", "nobody"], env=environment, check=True, cwd=workplace
    )
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
    return [part for setting in given for part in ("--set", setting)]


def test_a_stage_runs_on_the_pool_s_worker_and_is_found_after_that(place):
    arguments = ["prompt", "recipe.toml", *on_pool(place, "placement.prompt=box")]
    first = quiver(place, *arguments)
    assert (first["ref"], first["cached"], first["rows"]) == ("tiny/prompts@1", False, 4)
    (run,) = pool_runs()
    assert (run["name"], run["state_type"], run["work_pool_name"]) == (
        "tiny · prompt",
        "COMPLETED",
        "box",
    )
    again = quiver(place, *arguments)
    assert (again["ref"], again["cached"], len(pool_runs())) == (
        "tiny/prompts@1",
        True,
        1,
    )


def test_the_stage_s_own_error_comes_back(place):
    arguments = [
        "prompt",
        "recipe.toml",
        *on_pool(place, "placement.prompt=box", "data.source=nowhere.jsonl"),
    ]
    here = quiver(
        place, "prompt", "recipe.toml", *on_pool(place, "data.source=nowhere.jsonl"), code=2
    )["error"]
    assert quiver(place, *arguments, code=2)["error"] == here
    assert "nowhere.jsonl" in here["message"]


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


def test_another_store_at_the_same_path_is_refused(place, tmp_path):
    from quiver.flows.stage import StageCall
    from quiver.schemas.errors import ConfigError

    here = Store(tmp_path / "store")
    call = StageCall(
        stage="prompt", config={}, store=str(here.path), store_id="that of the host that asks"
    )
    with pytest.raises(ConfigError, match="another store"):
        call.require_store()
    with pytest.raises(ConfigError, match="no store here"):
        call.model_copy(update={"store": str(tmp_path / "not mounted")}).require_store()
    assert not (tmp_path / "not mounted").exists()


def test_a_whole_run_with_two_calls_that_share(place):
    """Generation in the pool as two flow runs: when one has done it, the stage is done, and there
    is one version."""
    settings = on_pool(place, "placement.generate=box", "placement.fan_out=2")
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


@pytest.mark.slow
def test_ctrl_c_ends_the_stage_on_the_worker(place):
    slow = (
        "generate.rows_per_shard=2",
        "generate.sampling.max_tokens=200",
        "generate.sampling.ignore_eos=true",
        "seed=3",
    )
    arguments = ["run", "recipe.toml", *on_pool(place, "placement.generate=box", *slow)]
    running = subprocess.Popen(
        [sys.executable, "-m", "quiver.flows.cli", *arguments],
        cwd=place,
        env=command_environment(place),
    )
    while not [*(place / "store/tiny/rollouts/.staging").glob("*.notes/*.json")]:
        assert running.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.05)
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 130
    assert left_behind(place, "-m\0quiver.stages\0generate") == []
    states = {run["state_type"] for run in pool_runs() if run["work_pool_name"] == "box"}
    assert states & {"CANCELLING", "CANCELLED"} and not states & {"RUNNING", "PENDING", "SCHEDULED"}
