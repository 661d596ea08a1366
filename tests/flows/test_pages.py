"""What a Prefect server holds after a stage: events of assets, tables, pages and progress, read
back through its API."""

import json
import logging
import time
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.context import get_run_context
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from quiver.flows import progress as progress_module
from quiver.flows.look.pages import Curve, link_report, show_version, text
from quiver.flows.look.pages.events import EVENT
from quiver.flows.progress import progress
from quiver.stages.core.run.runner import Call, Outcome
from quiver.stages.core.store import Store, Version
from tests.flows.test_pages_text import done, drawn, lines, write_rollouts

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module", autouse=True)
def without_heartbeat(api):
    """A run's heartbeat takes a second to end."""
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


@task
def finish(call: Call, outcome: Outcome) -> None:
    show_version(call, outcome)


@flow
def whatever(action) -> str:
    """Do it, and tell which run did."""
    action()
    return str(get_run_context().flow_run.id)


def shown(action) -> dict[str, dict]:
    """What the server holds by key after `action` in a flow run: type, description, and the data as
    it was."""
    run = whatever(action)
    only = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run]))
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=only)
    return {
        artifact.key: {
            "type": artifact.type,
            "description": artifact.description,
            "data": json.loads(artifact.data) if artifact.type == "table" else artifact.data,
        }
        for artifact in found
    }


def event_of(ref: str) -> dict:
    """The event of this version's asset, once a thread has sent it."""
    asset = f"quiver://{ref.partition('@')[0]}"
    body = {"filter": {"event": {"name": [EVENT]}, "resource": {"id": [asset]}}}
    with get_client(sync_client=True) as client:
        for _ in range(200):
            for event in client.request("POST", "/events/filter", json=body).json()["events"]:
                if event["payload"]["ref"] == ref:
                    return event
            time.sleep(0.1)
    raise AssertionError(f"no event of {ref}")


def finished(store: Store, version: Version, cached: bool = False):
    """What the task of a stage does at its end."""
    outcome = Outcome(str(version.ref), cached, version.manifest.rows, 1.0, {})
    return lambda: finish(Call("generate", {}, store.url, into="tiny"), outcome)


# -- assets


def test_a_new_version_is_an_event_of_its_asset_and_a_cached_one_is_none(store):
    sampled = write_rollouts(store, ["a", "b"], run="events.1")
    assert shown(finished(store, sampled, cached=True)) == {}
    (page,) = shown(finished(store, sampled)).values()
    assert (page["type"], len(page["data"])) == ("table", 2)
    event = event_of("events.1/rollouts@1")
    assert event["resource"]["prefect.resource.id"] == "quiver://events.1/rollouts"
    assert event["payload"] == {
        "ref": "events.1/rollouts@1",
        "run": "events.1",
        "kind": "rollouts",
        "version": 1,
        "rows": 2,
        "stage": "test",
        "content_hash": sampled.manifest.content_hash,
    }
    upstream = [each for each in event["related"] if each["prefect.resource.role"] == "asset"]
    assert [(each["prefect.resource.id"], each["quiver.ref"]) for each in upstream] == [
        ("quiver://events.1/prompts", "events.1/prompts@1")
    ]
    assert {"flow-run", "task-run"} <= {each["prefect.resource.role"] for each in event["related"]}


def test_a_version_that_is_not_there_is_said_once_and_fails_nothing(store, caplog):
    gone = Outcome("tiny/rollouts@9", False, 1, 1.0, {})
    with caplog.at_level(logging.WARNING, "quiver"):
        assert shown(lambda: finish(Call("generate", {}, store.url, into="tiny"), gone)) == {}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "quiver"]
    assert "not on Prefect's pages: the event of tiny/rollouts@9 (LineageError" in said


def test_a_link_to_the_report(store, policy):
    folder, path = store.url, Path(store.url) / "tiny/report.html"
    link = shown(lambda: link_report(folder, "tiny", None))["report-tiny"]
    assert link["type"] == "markdown" and path.as_uri() in link["data"]
    assert "<title>tiny · report" in path.read_text()
    url = "https://files.example/store/"
    link = shown(lambda: link_report(folder, "tiny", url))["report-tiny"]
    assert "(https://files.example/store/tiny/report.html)" in link["data"]


def test_only_a_report_that_was_written_has_a_path(store, policy):
    assert link_report(store.url, "tiny", None) == f"{store.url}/tiny/report.html"
    assert link_report(store.url, "no-such-run", None) is None


def test_the_curve_of_a_run_is_one_page_that_grows():
    def run() -> None:
        curve = Curve("tiny")
        curve.show([done(1, 0.1)], None)
        curve.show([done(1, 0.1), done(2, 0.2)], None)  # too soon
        curve.show([done(n, n / 10) for n in (1, 2, 3)], None, last=True)

    (page,) = shown(run).values()
    assert page["description"] == "3 iterations: mean reward 0.1 → 0.3"
    assert [len(line) for line in lines(drawn(page["data"]))] == [3]


# -- progress


def wait_for(bar_says: float, key: str) -> None:
    named = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    with get_client(sync_client=True) as client:
        for _ in range(200):
            found = client.read_artifacts(artifact_filter=named)
            if found and found[0].data == bar_says:
                return
            time.sleep(0.05)
    raise AssertionError(f"{key} never said {bar_says}")


def test_progress_comes_while_the_stage_runs(store, monkeypatch):
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN", 0.05)
    call, heard, key = (
        Call("generate", {}, store.url, into="under.way"),
        [],
        text.key("progress-generate", "under.way"),
    )

    def run() -> None:
        with progress(call, heard.append) as on_line:
            on_line("reward function x: 3 of 4 <b>")
            on_line("generate: 4 of 16 rows, 100 tokens/s")
            wait_for(25.0, key)
            on_line("generate: 12 of 16 rows, 100 tokens/s")
            wait_for(75.0, key)

    (page,) = shown(run).values()
    assert page == {
        "type": "progress",
        "data": 100.0,
        "description": "`generate: 12 of 16 rows, 100 tokens/s`",
    }
    assert len(heard) == 3


def test_a_short_stage_leaves_no_progress_and_a_failed_one_what_it_had(store, monkeypatch):
    call = Call("generate", {}, store.url, into="short")

    def short() -> None:
        with progress(call, lambda line: None) as on_line:
            on_line("generate: 16 of 16 rows, 100 tokens/s")

    assert shown(short) == {}
    monkeypatch.setattr(progress_module, "SECONDS_BETWEEN", 0.05)

    def fails() -> None:
        with pytest.raises(ValueError), progress(call, lambda line: None) as on_line:
            on_line("generate: 8 of 16 rows, 100 tokens/s")
            wait_for(50.0, "progress-generate-short")
            raise ValueError

    (page,) = shown(fails).values()
    assert page["data"] == 50.0
