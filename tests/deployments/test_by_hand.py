"""What somebody does in a shell starts what waits for it on a real Prefect server; without one it
costs nothing of Prefect's."""

import getpass
import socket
import subprocess
import sys

import pytest
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterId
from prefect.events.filters import EventFilter, EventNameFilter

from quiver.deployments.deploy import Where, deploy
from quiver.flows.recipe import load
from quiver.stages.common.store import Store
from tests.deployments.prefect_world import wait_for, world
from tests.flows.conftest import command_environment, own_home, quiver, write_recipe

MADE, MOVED = "prefect.asset.materialization.succeeded", "quiver.tag.moved"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A server that knows a password, and two deployments that wait for what run `tiny` makes."""
    folder = write_recipe(tmp_path_factory.mktemp("hand"))
    with (
        world(folder, auth="somebody:pass word") as made,
        made.client() as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        client.create_work_pool(WorkPoolCreate(name="box", type="process"))
        deploy(load("recipe.toml", ["run=trainer"]), Where("box", on=("tiny/prompts",)))
        deploy(load("recipe.toml", ["run=user"]), Where("box", on=("tiny/policy@prod",)))
        yield made


def by_hand(place, *arguments: str) -> dict:
    return quiver(
        place.folder, *arguments, PREFECT_API_URL=place.url, PREFECT_API_AUTH_STRING=place.auth
    )


def started(client, run: str) -> int:
    deployment = client.read_deployment_by_name(f"post-train/{run}").id
    return len(
        client.read_flow_runs(
            deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[deployment]))
        )
    )


def events(client, name: str, count: int) -> list:
    """The server's events of this name, oldest first, as soon as there are `count`: it writes them
    down some seconds later."""

    def found() -> list:
        told = client.read_events(EventFilter(event=EventNameFilter(name=[name])), limit=50).events
        return sorted(told, key=lambda event: event.occurred) if len(told) >= count else []

    return wait_for(f"{count} events {name}", found, 60)


@pytest.mark.prefect
def test_versions_and_tags_by_hand_start_what_waits_for_them(place):
    with place.client() as client:
        made = by_hand(place, "prompt", "recipe.toml")["ref"]
        wait_for("a run of what waits for prompts", lambda: started(client, "trainer"), 60)
        assert by_hand(place, "prompt", "recipe.toml")["cached"], "nothing new, and nothing is told"
        for reason in ("it reads well", "it points there already"):
            by_hand(place, "tag", "prod", "tiny/policy@0", "--reason", reason)
        wait_for("a run of what waits for the tag", lambda: started(client, "user"), 60)
        by_hand(
            place,
            "evaluate",
            "recipe.toml",
            "--set",
            "generate.engine=scripted",
            "--set",
            "data.source=./held_out.jsonl",
        )
        told = events(client, MADE, 6)
        (moved,) = events(client, MOVED, 1)
        assert (started(client, "trainer"), started(client, "user")) == (1, 1)
    assert [event.payload["ref"] for event in told] == [
        "tiny/policy@0", made, "tiny.eval/prompts@1", "tiny.eval/rollouts@1", "tiny.eval/rewards@1", "tiny/evaluations@1",
    ]  # fmt: skip
    assert told[1].resource.id == "quiver://tiny/prompts"
    (policy,) = [related for related in told[1].related if related.get("quiver.role") == "policy"]
    assert (policy.id, policy["quiver.ref"]) == ("quiver://tiny/policy", "tiny/policy@0")
    assert moved.resource.id == "quiver://tiny/policy@prod"
    (entry,) = Store(place.folder / "store").history("tiny", "prod")
    assert moved.payload == {
        "author": getpass.getuser(),
        "why": "it reads well",
        "before": None,
        "in_use": "tiny/policy@0",
        "at": entry.at,
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with one version, and no server."""
    folder = write_recipe(tmp_path_factory.mktemp("alone"))
    quiver(folder, "prompt", "recipe.toml")
    return folder


def test_without_a_server_prefect_is_not_imported(alone):
    code = (
        "import sys; from quiver.flows.cli import main\ntry: main()\nexcept SystemExit as end: "
        "assert "
        "not end.code\n"
        "print({'prefect', 'torch'} & set(sys.modules))"
    )
    for command in (
        ["tag", "best", "tiny/policy@0"],
        ["prompt", "recipe.toml", "--iteration", "2"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *command],
            cwd=alone, env=own_home(alone), capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and done.stdout.endswith("\nset()\n"), done.stdout + done.stderr


def test_a_server_that_does_not_take_it_costs_a_warning(alone):
    """It is busy, and asks to be left alone for ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as busy:
        env = {
            **command_environment(alone),
            "PREFECT_API_URL": f"http://127.0.0.1:{busy.getsockname()[1]}/api",
        }
        command = [sys.executable, "-m", "quiver.flows.cli", "tag", "prod", "tiny/policy@0"]
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
        "tiny/policy@prod: Prefect's server was not told of it, so no deployment starts by it ("
    )
