"""`quiver deploy` against a real server that asks for a password: what is registered, what is
refused, what changes when; and what a command in a shell starts there, or costs without one."""

import asyncio
import datetime
import getpass
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zoneinfo import ZoneInfo

import prefect
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.objects import State, StateType
from prefect.events import emit_event
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.events.worker import EventsWorker
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_URL,
    PREFECT_HOME,
    temporary_settings,
)
from prefect.states import Running
from prefect.workers.base import BaseJobConfiguration
from prefect.workers.process import ProcessJobConfiguration, ProcessWorker

from quiver.deployments.automations import TAG, install, on_event, silent_runs
from quiver.deployments.deploy import Where, deploy
from quiver.deployments.serve import said_once
from quiver.deployments.server import check_api, listening, own_server
from quiver.flows import prefect_server
from quiver.flows.cli import placing
from quiver.flows.post_train import post_train
from quiver.flows.prefect_server import shell_tag
from quiver.flows.recipe import Recipe, load
from quiver.schemas.errors import ConfigError, RemoteError, ResourceError, SecurityError
from quiver.stages.core.store import Store
from tests.deployments.prefect_world import wait_for, world
from tests.flows.conftest import command_line, free_port, own_home, quiver, write_recipe

pytestmark = pytest.mark.prefect
ROOT = Path(__file__).parents[2]
SCHEDULE = {"cron": "0 2 * * *", "timezone": "Europe/Berlin"}
ELSEWHERE = [
    "store=/srv/store", "policy.model=/srv/model", "data.source=/srv/questions.jsonl", "data.held_out=null",
    "reward.functions=[{use='exact_match'}]",
]  # fmt: skip
"""Settings under which every path lies where an image could have it."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A server that listens to everybody and knows a password, and a folder with a recipe."""
    folder = write_recipe(tmp_path_factory.mktemp("deploy"))
    with world(folder, host="0.0.0.0", auth="somebody:pass word") as made, made.client() as client:
        client.create_work_pool(WorkPoolCreate(name="box", type="process"))
        of_pool = {"default": "registry/quiver:pool"}
        mounts = [f"{folder}:{folder}"]
        for name, image, volumes in (("containers", {}, []), ("mounted", of_pool, mounts)):
            template = {
                "job_configuration": {
                    "env": "{{ env }}",
                    "image": "{{ image }}",
                    "volumes": "{{ volumes }}",
                },
                "variables": {
                    "properties": {
                        "env": {"default": {"OWN": "1"}},
                        "image": image,
                        "volumes": {"default": volumes},
                    }
                },
            }
            client.create_work_pool(
                WorkPoolCreate(name=name, type="docker", base_job_template=template)
            )
        yield made


@pytest.fixture
def client(place, monkeypatch):
    monkeypatch.chdir(place.folder)
    with place.client() as client:
        yield client


def put(where: Where, *settings: str) -> dict:
    return deploy(load("recipe.toml", settings), where)


def by_hand(place, *arguments: str) -> dict:
    return quiver(place.folder, *arguments, **place.env)


def everything(client) -> list:
    """All that the server holds of deployments, schedules, limits, automations and runs to come."""
    told = []
    for kind in ("deployments", "automations", "v2/concurrency_limits", "flow_runs"):
        rows = client.request("POST", f"/{kind}/filter", json={}).json()
        own = {"last_polled", "status", "estimated_start_time_delta", "estimated_run_time"}
        told.append(
            sorted(
                ({k: v for k, v in row.items() if k not in own} for row in rows),
                key=lambda row: row["id"],
            )
        )
    return told


def registered(client) -> list:
    """The same without the runs that the scheduler adds, at any time, for deployments that are
    there already."""
    *held, runs = everything(client)
    return [*held, [run["id"] for run in runs if not run["auto_scheduled"]]]


def found(client, name: str):
    return client.read_deployment_by_name(f"post-train/{name}")


def runs_of(client, name: str) -> list[dict]:
    deployment = str(found(client, name).id)
    return [run for run in everything(client)[3] if run["deployment_id"] == deployment]


def test_deploying_twice_changes_nothing_twice(client):
    where = Where("box", **SCHEDULE, on=("feed/prompts",))
    first = put(where)
    (entry,) = first["deployments"]
    assert entry == {"name": "post-train/tiny", "pool": "box", "new": True, "changed": False}
    assert all(each["new"] and not each["changed"] for each in first["automations"][1:])
    wait_for("the scheduler", lambda: len(everything(client)[3]) >= 3)
    before = everything(client)
    for run in before[3]:
        due = datetime.datetime.fromisoformat(run["expected_start_time"].replace("Z", "+00:00"))
        assert due.astimezone(ZoneInfo("Europe/Berlin")).strftime("%H:%M") == "02:00"
    again = put(where)
    for each in (*again["deployments"], *again["automations"]):
        assert not each["new"] and not each["changed"]
    assert again["each"] == "2 more iterations"
    assert everything(client) == before
    assert len(before[1]) == 2, "one automation for silent runs, one for new prompts"


def test_runs_whose_process_is_gone_crash(client, place, monkeypatch):
    """On this host, also before its restart; page by page."""
    living = shell_tag()
    _, _, *process, started_at, host = living.split(":")
    elsewhere = ":".join(["shell:another-start", *process, started_at])
    tags = {
        "lost": living.replace(f":{started_at}:", ":7:"),  # its process had this number before
        "before the restart": f"{elsewhere}:{host}",
        "going on": living,
        "on another host": f"{elsewhere}:another-host",
        "of somebody else": elsewhere,
    }
    runs = [
        client.create_flow_run(post_train, name=name, tags=[tag], state=Running())
        for name, tag in tags.items()
    ]
    monkeypatch.setattr(prefect_server, "RUNS_AT_ONCE", 2)
    assert prefect_server.crash_abandoned() == 2
    crashed = [run.name for run in runs if client.read_flow_run(run.id).state.is_crashed()]
    assert crashed == ["lost", "before the restart"]
    answer = by_hand(place, "doctor")
    assert answer["prefect"] == {
        "home": place.env["PREFECT_HOME"],
        "api": place.url,
        "server": prefect.__version__,
    }
    for run in runs:
        client.delete_flow_run(run.id)


def test_a_host_is_known_by_a_name_that_tells_it_from_others(monkeypatch):
    """Containers of one image share a machine-id, and may all be called localhost."""
    hosts = {}
    for name in ("a", "b", "localhost", "localhost.localdomain", ""):
        monkeypatch.setattr(prefect_server.socket, "gethostname", lambda name=name: name)
        hosts[name] = prefect_server.host_id()
    assert [name for name, host in hosts.items() if host] == ["a", "b"]
    assert hosts["a"] != hosts["b"]


def test_what_is_deployed_anew_takes_the_place_of_the_old(client):
    put(Where("box", **SCHEDULE, on=("feed/prompts",)), "run=moved")
    assert found(client, "moved").concurrency_options.collision_strategy == "ENQUEUE"
    answer = put(Where("box", cron="30 4 * * 1", if_running="skip"), "run=moved", "iterations=5")
    assert answer["deployments"][0]["changed"] and not answer["deployments"][0]["new"]
    now = found(client, "moved")
    assert [schedule.schedule.cron for schedule in now.schedules] == ["30 4 * * 1"]
    assert (now.concurrency_options.collision_strategy, now.global_concurrency_limit.limit) == (
        "CANCEL_NEW",
        1,
    )
    assert now.parameters["recipe"]["iterations"] == 5
    assert not [each for each in everything(client)[1] if each["name"].endswith("post-train/moved")]
    started = put(Where("box", now=True), "run=moved")["flow_run"]
    assert found(client, "moved").schedules == []
    assert client.read_flow_run(uuid.UUID(started)).idempotency_key, (
        "asked for again, it is one run"
    )


def test_the_parameters_are_the_recipe_with_absolute_paths(client, place):
    put(Where("box"), "run=plain", "optimize.learning_rate=2e-6", "optimize.seed=0")
    sent = Recipe.model_validate(found(client, "plain").parameters["recipe"])
    assert (
        sent.store == f"{place.folder}/store"
        and sent.data.source == f"{place.folder}/questions.jsonl"
    )
    assert sent.optimize.learning_rate == 2e-6
    assert sent.generate_config(1).seed == 7, "what the recipe leaves open is left open"
    assert sent.optimize_config().seed == 0, "and what it says stays said, a default too"


@pytest.mark.parametrize(
    ("pool", "configuration"),
    [("shared", ProcessJobConfiguration), ("mounted", BaseJobConfiguration)],
    ids=["process", "docker"],
)
def test_a_run_has_its_pools_environment_as_it_is_when_it_starts(client, pool, configuration):
    """As Prefect's worker makes it: the pool's own, changed since the run was deployed, and the
    heartbeat over it."""
    if pool == "shared":
        template = ProcessWorker.get_default_base_job_template()
        template["variables"]["properties"]["env"]["default"] = {"OWN": "1"}
        client.create_work_pool(
            WorkPoolCreate(name=pool, type="process", base_job_template=template)
        )
    put(Where(pool, image="registry/quiver:cpu" if pool == "mounted" else None), f"run=in-{pool}")
    deployment = found(client, f"in-{pool}")
    assert deployment.job_variables.get("image") == (
        "registry/quiver:cpu" if pool == "mounted" else None
    )
    run = client.create_flow_run_from_deployment(deployment.id)
    template = client.read_work_pool(pool).base_job_template
    template["variables"]["properties"]["env"]["default"] = {"OWN": "2", "MORE": "3"}
    client.update_work_pool(pool, WorkPoolUpdate(base_job_template=template))

    async def resolved() -> BaseJobConfiguration:
        async with get_client() as at:
            work_pool = await at.read_work_pool(pool)
            return await configuration.resolve_for_flow_run(
                run, client=at, work_pool=work_pool, worker_name="w"
            )

    if pool == "mounted":
        put(Where(pool), "run=as-the-pool-says")
        own = found(client, "as-the-pool-says").job_variables["image"]
        assert own == "registry/quiver:pool", "where no other is named"
    env = asyncio.run(resolved()).env
    assert (env["OWN"], env["MORE"], env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == ("2", "3", "30")


@pytest.mark.parametrize(
    ("source", "flow"),
    [
        ("tiny/prompts", "nightly"),
        ("tiny.eval/rollouts", "post-train"),
        ("tiny.eval/rollouts", "nightly"),
        ("tiny.ref/policy", "post-train"),
        ("tiny/policy@prod", "nightly"),
    ],
)
def test_a_deployment_that_would_start_itself_is_refused(source, flow):
    """By what its run writes beside itself too; only a night moves a tag."""
    with pytest.raises(ConfigError, match="makes these versions itself") as error:
        on_event(source, f"{flow}/tiny")
    assert error.value.object == f"--on {source}"
    for other in ("tiny/policy@prod", "tiny.2/policy", "tin.eval/rollouts"):
        assert on_event(other, "post-train/tiny").match.root == {
            "prefect.resource.id": [f"quiver://{other}"]
        }


def test_what_can_not_work_is_refused_and_nothing_is_registered(client):
    before = registered(client)
    for where, settings, object, next in (
        (
            Where("nowhere"),
            [],
            "work pool nowhere",
            "prefect worker start --pool nowhere --type process",
        ),
        (Where("containers"), ELSEWHERE, "work pool containers", "--image"),
        (Where("containers", image="quiver"), [], "store", "put it where every host sees it"),
        (Where("box", cron="at night"), [], "--cron at night --timezone UTC", "0 2 * * *"),
        (Where("box", cron="0 0 31 2 *"), [], "--cron 0 0 31 2 * --timezone UTC", "0 2 * * *"),
        (
            Where("box", cron="0 2 * * *", timezone="Mars/Base"),
            [],
            "--cron 0 2 * * * --timezone Mars/Base",
            "Europe/Berlin",
        ),
        (Where("box", on=("tiny/prompts",)), [], "--on tiny/prompts", "name another run"),
        (Where("box", on=("feed",)), [], "--on feed", "--on feed/prompts"),
        (Where("box"), ["data.source=gone.jsonl"], "data.source", "correct data.source"),
        (
            Where("box"),
            ["data.prompt=answr"],
            "data.prompt answr",
            "set data.prompt to one of them",
        ),
        (Where("box", image="quiver:cpu"), [], "--image quiver:cpu", "leave --image out"),
        (
            Where("box"),
            ["data.held_out.source=rows of {night}.jsonl"],
            "data.held_out.source",
            "quiver nightly RECIPE",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            put(where, *settings)
        assert error.value.object.startswith(object) and next in error.value.next
    for called, options, object, next in (
        (placing.serve, {"port": 4300}, "--port 4300", "leave --port out"),
        (placing.serve, {"timezone": "Europe/Berlin"}, "--timezone Europe/Berlin", "--cron"),
        (
            placing.serve,
            {"settings": ["data.prompt=answr"]},
            "data.prompt answr",
            "set data.prompt to one of them",
        ),
        (
            placing.deploy,
            {"pool": "box", "timezone": "Europe/Berlin"},
            "--timezone Europe/Berlin",
            "--cron",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            called(Path("recipe.toml"), **options)
        assert error.value.object == object and next in error.value.next
    assert registered(client) == before


def test_an_image_is_for_those_of_several_pools_that_take_one(client, place):
    """The flow runs in a process, generation in a container."""
    put(
        Where("box", image="registry/quiver:cpu"),
        "run=mixed",
        "placement.generate=mounted",
        f"store={place.folder}/store",
    )
    assert "image" not in found(client, "mixed").job_variables
    assert (
        client.read_deployment_by_name("stage/mounted").job_variables["image"]
        == "registry/quiver:cpu"
    )


def test_serve_says_as_json_what_it_serves(place, client):
    command = [*command_line(), "serve", "recipe.toml", "--json"]
    command += ["--set", "run=served"]
    with subprocess.Popen(
        command, cwd=place.folder, env=place.env, stdout=subprocess.PIPE, text=True
    ) as serving:
        told = json.loads(serving.stdout.readline())
        serving.terminate()
        rest, _ = serving.communicate(timeout=60)
    none = {"cron": None, "timezone": "UTC", "each": "the rest of the recipe", "flow_run": None}
    assert told == {"api": place.url, "deployment": "post-train/served", **none}
    assert (serving.returncode, rest) == (143, "")
    assert found(client, "served").name == "served"


def test_the_command_registers_what_it_says(place):
    answer = by_hand(place, "deploy", "recipe.toml", "--pool", "box")
    assert answer["deployments"][0]["name"] == "post-train/tiny"


@pytest.mark.parametrize(
    ("settings", "error", "next"),
    [
        *(
            (
                {PREFECT_API_AUTH_STRING: auth},
                ConfigError,
                "export PREFECT_API_AUTH_STRING=user:password",
            )
            for auth in (None, "somebody:else")
        ),
        (
            {PREFECT_API_URL: None},
            ConfigError,
            "prefect server start, then export PREFECT_API_URL=",
        ),
        ({PREFECT_API_URL: "http://127.0.0.1:9/api"}, RemoteError, "prefect server start"),
    ],
)
def test_without_a_server_nothing_goes(place, settings, error, next):
    with (
        temporary_settings({PREFECT_API_URL: place.url, **settings}),
        pytest.raises(error) as refused,
    ):
        check_api()
    assert next in refused.value.next


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_who_can_reach_a_port_is_read_from_the_system(address):
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
        server.bind((address, 0))
        server.listen()
        assert listening(server.getsockname()[1]) == [address]


def test_a_server_of_ones_own_does_not_push_another_aside():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="is in use") as error, own_server(port):
            pass
        assert f"export PREFECT_API_URL=http://127.0.0.1:{port}/api" in error.value.next


def test_a_server_of_ones_own_that_does_not_come_up_says_where_its_last_words_are(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PREFECT_API_DATABASE_CONNECTION_URL", "sqlite+aiosqlite:////proc/none/db")
    with (
        temporary_settings({PREFECT_HOME: tmp_path}),
        pytest.raises(ResourceError, match="ended"),
        own_server(free_port()),
    ):
        pass
    (log_file,) = tmp_path.glob("server-*.log")
    assert "unable to open database file" in log_file.read_text()
    assert "PREFECT_API_URL" not in os.environ


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_open_server_is_for_loopback_alone(host):
    class Open(BaseHTTPRequestHandler):
        """Answers without credentials."""

        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            body = b"[]" if self.command == "POST" else b"{}"
            self.send_response(404 if "csrf-token" in self.path else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    with ThreadingHTTPServer((host, 0), Open) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: url}):
            if host == "127.0.0.1":
                assert check_api() == url
            else:
                said = r"listens on 0\.0\.0\.0 and answers without credentials"
                with pytest.raises(SecurityError, match=said):
                    check_api()
        server.shutdown()


def test_entries_of_prefect_yaml_are_deployed_by_prefect(client, place):
    """The build step runs, and its recipe arrives whole: from this folder for processes, from the
    image's for containers."""
    for name, kind in (("cpu", "process"), ("cpu-docker", "docker")):
        client.create_work_pool(WorkPoolCreate(name=name, type=kind))
    command = [sys.executable, "-m", "prefect", "--no-prompt", "deploy"]
    command += ["--prefect-file", "deployments/prefect.yaml"]
    command += ["--name", "cpu-process", "--name", "cpu-docker"]
    done = subprocess.run(
        command, cwd=ROOT, env=place.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    own, boxed = (
        Recipe.model_validate(found(client, name).parameters["recipe"])
        for name in ("cpu-process", "cpu-docker")
    )
    assert (
        own.data.source == f"{ROOT}/deployments/recipes/t5_digits.py:rows"
        and own.store == f"{ROOT}/store"
    )
    assert (
        boxed.data.source == "/opt/quiver/deployments/recipes/t5_digits.py:rows"
        and boxed.store == "/srv/quiver/store"
    )
    assert own.optimize == boxed.optimize == load(ROOT / "deployments/recipes/t5_ppo.toml").optimize
    assert found(client, "cpu-docker").job_variables["volumes"] == ["/srv/quiver:/srv/quiver"]
    assert [schedule.active for schedule in found(client, "cpu-process").schedules] == [False]


def test_a_run_that_falls_silent_has_crashed(client):
    """Of two runs that beat once, the one that never beats again is marked, the one that completes
    is not."""
    put(Where("box"), "run=silent")
    install(client, silent_runs(seconds=10))
    deployment = found(client, "silent").id
    runs = [client.create_flow_run_from_deployment(deployment).id for _ in range(2)]
    for run in runs:
        client.set_flow_run_state(run, State(type=StateType.RUNNING), force=True)
        tag = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
        resource = {"prefect.resource.id": f"prefect.flow-run.{run}"}
        emit_event("prefect.flow-run.heartbeat", resource, related=[tag])
    EventsWorker.drain_all()
    client.set_flow_run_state(runs[1], State(type=StateType.COMPLETED), force=True)
    wait_for(
        "the automation",
        lambda: client.read_flow_run(uuid.UUID(str(runs[0]))).state.type == StateType.CRASHED,
    )
    assert client.read_flow_run(runs[1]).state.type == StateType.COMPLETED
    assert install(client, silent_runs())["changed"], "deploy puts its own time back"


def test_a_run_that_is_due_while_another_runs_is_told_once(caplog, monkeypatch):
    """As Prefect's runner logs it, every few seconds; what else it says stays."""
    logger = logging.getLogger("prefect.runner.state_proposer")
    once = said_once()
    logger.addFilter(once)
    logger.addHandler(caplog.handler)  # whether Prefect's loggers propagate is its own setting
    monkeypatch.setattr(logger, "propagate", False)
    refused = "Aborted submission of flow run '%s': Server returned a non-pending state %r"
    try:
        with caplog.at_level("INFO", logger.name):
            for flow_run in ("first", "first", "second", "first"):
                logger.info(refused, flow_run, "SCHEDULED")
            logger.info(refused, "third", "CANCELLED")
    finally:
        logger.removeFilter(once)
        logger.removeHandler(caplog.handler)
    assert caplog.messages == [
        "flow run first is due; it waits until the last one has ended",
        "flow run second is due; it waits until the last one has ended",
        "Aborted submission of flow run 'third': Server returned a non-pending state 'CANCELLED'",
    ]


# -- by hand


MADE, MOVED = "prefect.asset.materialization.succeeded", "quiver.tag.moved"


def events(client, name: str, run: str, count: int) -> list:
    """The server's events of this name on a run's datasets, oldest first, as soon as there are
    `count`: it writes them down some seconds later."""

    def told() -> list:
        named = EventFilter(event=EventNameFilter(name=[name]))
        of_run = [
            event
            for event in client.read_events(named, limit=50).events
            if event.resource.id.startswith((f"quiver://{run}/", f"quiver://{run}.eval/"))
        ]
        return sorted(of_run, key=lambda event: event.occurred) if len(of_run) >= count else []

    return wait_for(f"{count} events {name}", told, 60)


def test_versions_and_tags_by_hand_start_what_waits_for_them(place, client):
    put(Where("box", on=("hand/prompts",)), "run=trainer")
    put(Where("box", on=("hand/policy@prod",)), "run=user")
    recipe = ("recipe.toml", "--set", "run=hand")
    made = by_hand(place, "prompt", *recipe)["ref"]
    wait_for("a run of what waits for prompts", lambda: runs_of(client, "trainer"), 60)
    assert by_hand(place, "prompt", *recipe)["cached"], "nothing new, and nothing is told"
    for reason in ("it reads well", "it points there already"):
        by_hand(place, "tag", "prod", "hand/policy@0", "--reason", reason)
    wait_for("a run of what waits for the tag", lambda: runs_of(client, "user"), 60)
    scripted = ("--set", "generate.engine=scripted", "--set", "data.source=./held_out.jsonl")
    by_hand(place, "evaluate", *recipe, *scripted)
    told = events(client, MADE, "hand", 6)
    (moved,) = events(client, MOVED, "hand", 1)
    assert len(runs_of(client, "trainer")) == len(runs_of(client, "user")) == 1
    assert [event.payload["ref"] for event in told] == [
        "hand/policy@0", made, "hand.eval/prompts@1", "hand.eval/rollouts@1", "hand.eval/rewards@1",
        "hand/evaluations@1",
    ]  # fmt: skip
    assert told[1].resource.id == "quiver://hand/prompts"
    (policy,) = [related for related in told[1].related if related.get("quiver.role") == "policy"]
    assert (policy.id, policy["quiver.ref"]) == ("quiver://hand/policy", "hand/policy@0")
    assert moved.resource.id == "quiver://hand/policy@prod"
    (entry,) = Store(place.folder / "store").history("hand", "prod")
    assert moved.payload == {
        "author": getpass.getuser(),
        "why": "it reads well",
        "before": None,
        "in_use": "hand/policy@0",
        "at": entry.at,
    }


def run_without_prefect(folder: Path, *command: str) -> None:
    code = (
        "import sys; from quiver.flows.cli.main import main\n"
        "try: main()\n"
        "finally: print({'prefect', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=folder, env=own_home(folder), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.endswith("\nset()\n"), done.stdout + done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with one version, and no server: `prompt` does not import Prefect."""
    folder = write_recipe(tmp_path_factory.mktemp("alone"))
    run_without_prefect(folder, "prompt", "recipe.toml")
    return folder


def test_without_a_server_prefect_is_not_imported(alone):
    run_without_prefect(alone, "tag", "best", "tiny/policy@0")


def test_a_server_that_does_not_take_it_costs_a_warning(alone):
    """It is busy, and asks to be left alone for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        url = f"http://127.0.0.1:{busy.getsockname()[1]}/api"
        env = {**own_home(alone), "PREFECT_API_URL": url}
        command = [*command_line(), "tag", "prod", "tiny/policy@0"]
        with subprocess.Popen(
            command, cwd=alone, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as tagging:
            busy.settimeout(60)
            connection, _ = busy.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 600\r\nContent-Length: 0\r\n\r\n"
                )
                said, told = tagging.communicate(timeout=60)
    assert (tagging.returncode, said) == (0, "tiny/policy@prod is tiny/policy@0\n")
    (line,) = told.splitlines()
    assert line.startswith(
        "tiny/policy@prod: its event did not reach Prefect's server, so it starts no deployment ("
    )
