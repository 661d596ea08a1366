"""Runs whose store is a bucket: commands, hosts that share no folder, and how many requests it takes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from quiver.flows.look.joined import open_joined
from quiver.flows.look.pages import link_report
from quiver.flows.verification import verify
from quiver.stages.core.run.runner import Call, find_or_make
from quiver.stages.core.store import Store, leases
from quiver.stages.core.store.copying import copy
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from tests.benchmarks.made import make_prompts, make_rollouts
from tests.buckets import two_providers
from tests.faults.proxy import Proxy
from tests.flows.conftest import (
    QUICK,
    command_environment,
    options,
    quiver,
    stay_here,
    write_recipe,
)
from tests.flows.test_pages import shown
from tests.stages.core.store.histories import make_policy
from tests.warm import REAL_PYTHON

pytestmark = pytest.mark.prefect


class Place(NamedTuple):
    """A folder with a recipe, whose store is a bucket."""

    folder: Path
    url: str

    def quiver(self, *words: str, **options) -> dict:
        return quiver(self.folder, *words, "--store", self.url, **options)


@pytest.fixture(scope="module")
def place(s3_server, tmp_path_factory) -> Iterator[Place]:
    """Shared by the tests of this file, in their order."""
    folder = write_recipe(tmp_path_factory.mktemp("runs") / "work")
    bucket = s3_server.make_bucket()
    with pytest.MonkeyPatch.context() as patch:
        for name, text in bucket.environment.items():
            patch.setenv(name, text)
        patch.setenv("XDG_CACHE_HOME", str(folder.with_name("cache")))
        yield Place(folder, bucket.url)


def settings(*more: str) -> list[str]:
    shortest = (*QUICK, "data.held_out=null", "iterations=1")
    return options((*shortest, *more))


@pytest.fixture(scope="module")
def result(place) -> dict:
    """The first run's answer."""
    return place.quiver("run", "recipe.toml", *settings())


def test_a_run_makes_its_versions_in_the_bucket(place, result):
    assert [done["policy"] for done in result["iterations"]] == ["tiny/policy@1"]
    assert verify(Store(place.url))[1] == []
    assert not (place.folder / "store").exists()


@pytest.fixture
def run_again(place, result, command, api, monkeypatch):
    """A function that runs the recipe with other settings; its stages in this process."""

    def run(*more: str) -> tuple[dict, list[str]]:
        stages = []
        stay_here(place.folder, monkeypatch, stages)
        code, answer = command("run", "recipe.toml", *settings(*more), "--store", place.url)
        assert code == 0, answer
        return answer, stages

    return run


def test_a_second_run_finds_all_of_it(result, run_again):
    again, stages = run_again()
    timeless = [[{**done, "seconds": 0} for done in each["iterations"]] for each in (result, again)]
    assert timeless[0] == timeless[1] and stages == []


def test_more_iterations_add_only_themselves(place, run_again):
    before = {str(ref) for ref in Store(place.url).refs()}
    assert run_again("iterations=2")[1] == ["prompt", "generate", "reward", "optimize"]
    added = {str(ref) for ref in Store(place.url).refs()} - before
    kinds = ("advantages", "policy", "prompts", "rewards", "rollouts", "updates")
    assert added == {f"tiny/{kind}@2" for kind in kinds}


@pytest.fixture
def told(place, result, command, monkeypatch):
    """A function that runs a command on the bucket, in this process, and returns its answer."""
    monkeypatch.chdir(place.folder)

    def run(*words: str) -> dict:
        code, answer = command(*words, "--store", place.url)
        assert code == 0, answer
        return answer

    return run


def test_versions_are_listed_with_their_sizes(place, told):
    refs = [version["ref"] for version in told("ls")["versions"]]
    assert refs == [str(ref) for ref in Store(place.url).refs()]
    assert told("ls", "--size")["runs"][0]["bytes"] > 0


def test_rows_are_shown(told):
    shown = told("show", "tiny/rewards@1", "-n", "2")
    assert (shown["ref"], len(shown["rows"])) == ("tiny/rewards@1", 2)


def test_a_lineage_reaches_back_to_the_base(told):
    assert "tiny/policy@0" in json.dumps(told("lineage", "tiny/policy@1"))


def test_everything_is_whole(told):
    assert told("verify")["bad"] == []


def test_a_report_is_written_here(place, told):
    path = Path(told("report", "tiny")["file"])
    assert path.parent == place.folder and "tiny/policy@2" in path.read_text()


def test_the_link_to_a_report_leads_here_and_not_into_the_bucket(place, told, api, monkeypatch):
    monkeypatch.chdir(place.folder)
    link = shown(lambda: link_report(place.url, "tiny", "https://files.example"))["report-tiny"]
    assert f"({place.folder.as_uri()}/s3" in link["data"]


def test_a_view_without_a_terminal_is_a_table(told):
    assert len(told("view", "tiny/rewards@1", "-n", "3")["rows"]) == 3


def test_a_view_reads_answers_beside_their_rewards(place, result):
    joined = open_joined(Store(place.url), "tiny/rewards@1")
    rewards = Store(place.url).open("tiny/rewards@1").table()["reward"].to_pylist()
    rows = joined.rows([0, 3])
    assert [row["reward"] for row in rows] == [rewards[0], rewards[3]]
    assert all(row["completion_text"] for row in rows)


def test_memory_is_estimated(place, told):
    assert told("fit", "recipe.toml", *settings())


def test_gc_deletes_what_is_not_kept(place, told):
    storage = Store(place.url).storage
    place_of_data = Store(place.url).open("tiny/rollouts@1").manifest.prefix
    told("gc", "--apply", "--keep", "1", "--grace-hours", "0")
    assert "tiny/rollouts@1" not in [version["ref"] for version in told("ls")["versions"]]
    assert storage.files(place_of_data) == {}
    assert told("verify")["bad"] == []


def test_a_tag_has_a_history(told):
    told("tag", "prod", "tiny/policy@1", "--reason", "good")
    told("tag", "prod", "tiny/policy@2", "--reason", "better")
    _, last = told("history", "tiny/policy@prod")["entries"]
    assert (last["before"], last["ref"], last["why"]) == (
        "tiny/policy@1",
        "tiny/policy@2",
        "better",
    )


# -- hosts that share no folder, and the number of requests

TOGETHER = """
import glob, os, time

def together(completions):
    # Waits until two processes are at it.
    open(f"begun-{os.getpid()}", "w").close()
    while len(glob.glob("begun-*")) < 2:
        time.sleep(0.02)
    return [float(len(text)) for text in completions]
"""
HOST = """
import json, sys
from quiver.stages.core.run.runner import Call, find_or_make

print(find_or_make(Call.from_json(json.loads(sys.argv[1]))).ref)
"""
SHARDS = 4


@pytest.fixture
def scoring(bucket, tmp_path, monkeypatch) -> Call:
    """Rewards of four shards, to be made in a bucket."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TOGETHER)
    store = Store(bucket.url)
    asked = make_prompts(store, SHARDS * 32)
    rollouts = make_rollouts(
        store, make_policy(store, 0, "bench"), SHARDS * ROWS_PER_SHARD - 7, 4, 4, asked=asked
    )
    config = {"functions": [{"use": "mine.py:together"}], "workers": 1}
    return Call("reward", config, bucket.url, {"rollouts": str(rollouts.ref)})


@pytest.mark.parametrize("bucket", ["az"], indirect=True)
def test_two_hosts_without_a_shared_folder_make_one_version(scoring, tmp_path):
    """Each writes some of its shards."""
    hosts = [
        subprocess.Popen(
            [REAL_PYTHON, "-c", HOST, json.dumps(replace(scoring, share=True).to_json())],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / name)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "other")
    ]
    assert [host.communicate()[0] for host in hosts] == ["bench/rewards@1\n"] * 2
    shared = Store(scoring.store).open("bench/rewards@1")
    assert shared.manifest.metrics["workers"] == 2
    copy(Store(scoring.store), str(tmp_path / "alone"))
    alone = find_or_make(replace(scoring, store=str(tmp_path / "alone"), force=True)).ref
    assert shared.table().equals(Store(tmp_path / "alone").open(alone).table())
    assert verify(Store(scoring.store))[1] == []


@two_providers
def test_requests_of_a_stage(scoring, bucket, monkeypatch, record_property):
    """Once it makes a version of four shards, once it finds it. Renewals go by the clock and are
    left out."""
    monkeypatch.setattr(leases, "_keep_renewed", lambda lease: None)
    with Proxy(bucket.endpoint) as proxy:
        for name, text in bucket.behind(proxy.url).items():
            monkeypatch.setenv(name, text)
        config = {"functions": [{"use": "length", "arguments": {"target": 3}}], "workers": 1}
        call = replace(scoring, config=config)
        made = proxy.follow()
        assert not find_or_make(call).cached
        found = proxy.follow()
        assert find_or_make(call).cached
        record_property("requests to make and to find it", (len(made), len(found)))
        assert len(made) <= 54 and len(found) <= 10


DEPLOY = (
    "from prefect.client.orchestration import get_client\n"
    "from prefect.client.schemas.actions import WorkPoolCreate\n"
    "from prefect.flows import EntrypointType; from quiver.flows.stage import stage\n"
    "with get_client(sync_client=True) as client:\n"
    "    client.create_work_pool(WorkPoolCreate(name='far', type='process'))\n"
    "    stage.to_deployment('far', work_pool_name='far', "
    "entrypoint_type=EntrypointType.MODULE_PATH).apply()\n"
)


@pytest.fixture
def workers(place):
    """Two workers of the pool `far`, which share no folder with a run, nor with each other."""
    environment = {
        **command_environment(place.folder),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "PREFECT_RUNNER_POLL_FREQUENCY": "1",
        "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
    }
    subprocess.run([REAL_PYTHON, "-c", DEPLOY], env=environment, cwd=place.folder, check=True)
    started = []
    for name in ("one", "other"):
        home = place.folder.with_name(name)
        home.mkdir()
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", "far"]
        started.append(
            subprocess.Popen(
                [*command, "--name", name, "--limit", "1"],
                env={**environment, "XDG_CACHE_HOME": str(home)},
                cwd=home,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
    yield
    for worker in started:
        worker.terminate()
    for worker in started:
        worker.wait(30)


@pytest.mark.slow
def test_a_pool_of_hosts_that_share_no_folder(place, result, workers):
    """They make one stage of a run; the others are made here."""
    far = ("placement.reward='far'", "placement.fan_out=2")
    uses = "reward.functions=[{use='length', arguments={target=3}}]"
    scored = place.quiver("run", "recipe.toml", *settings(*far, uses, "run='pooled'"))
    (done,) = scored["iterations"]
    assert done["rewards"] == "pooled/rewards@1"
    assert Store(place.url).numbers("pooled", "rewards") == [1]
    assert [*place.folder.parent.glob("o*/quiver/buckets/*")], "a worker's own copies"
    assert verify(Store(place.url))[1] == []
