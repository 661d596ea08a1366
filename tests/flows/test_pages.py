"""What a Prefect server holds after a stage: events of assets, tables, pages and progress, read
back through its API."""

import json
import logging
import re
import time
from typing import NamedTuple

import pyarrow as pa
import pytest
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.context import get_run_context
from prefect.events.filters import EventFilter, EventNameFilter
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from quiver.flows import progress as progress_module
from quiver.flows.pages import link_report, publish, text
from quiver.flows.pages.events import EVENT
from quiver.flows.pages.iterations import Curve
from quiver.flows.progress import progress
from quiver.schemas import fields, prompts, rewards, rollouts
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.store import Store, Version
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.report import samples
from quiver.stages.report.templates import SPAN_LIMIT
from tests.flows.test_pages_text import HOSTILE, drawn, lines
from tests.writing import begin, run_here

pytestmark = pytest.mark.prefect


class Linked(NamedTuple):
    """What `link_report` reads of a recipe."""

    run: str
    store: str
    report_url: str | None = None


@pytest.fixture(scope="module", autouse=True)
def without_heartbeat(api):
    """A run's heartbeat takes a second to end."""
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        yield


@task
def finish(call: Call, outcome: Outcome) -> None:
    publish(call, outcome)


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
    assert len({each.key for each in found}) == len(found)
    assert all(len(json.dumps(each.data)) < 64_000 for each in found)
    parsed = {
        each.key: json.loads(each.data) if each.type == "table" else each.data for each in found
    }
    return {
        each.key: {"type": each.type, "description": each.description, "data": parsed[each.key]}
        for each in found
    }


def events(*refs: str) -> list[dict]:
    """The events of the assets in these versions' run, oldest first, once all of `refs` are there:
    a thread sends them."""
    run = refs[0].partition("/")[0]
    body = {
        "filter": EventFilter(event=EventNameFilter(name=[EVENT])).model_dump(mode="json"),
        "limit": 50,
    }
    with get_client(sync_client=True) as client:
        for _ in range(200):
            found = client.request("POST", "/events/filter", json=body).json()["events"]
            found = [event for event in found if event["payload"]["run"] == run]
            if set(refs) <= {event["payload"]["ref"] for event in found}:
                return sorted(found, key=lambda event: event["occurred"])
            time.sleep(0.1)
    raise AssertionError(f"no events of {refs}")


def write(
    store: Store, kind: str, table: pa.Table, run: str = "tiny", metrics=None, **inputs: Version
) -> Version:
    with begin(
        store, run, kind, stage="test", stage_version=1, config=Config(), inputs=inputs, force=True
    ) as work:
        for index, start in enumerate(range(0, max(1, table.num_rows), ROWS_PER_SHARD)):
            work.write(index, table.slice(start, ROWS_PER_SHARD))
        return work.commit(metrics=metrics, status={"stop": table.num_rows})


def write_rollouts(store: Store, texts: list[str], run: str = "tiny") -> Version:
    """One rollout a prompt; prompt n asks `question n`, rollout n has n + 1 tokens."""
    groups = [f"g{index}" for index in range(len(texts))]
    schema = fields.with_struct(prompts.SCHEMA, columns=pa.struct([pa.field("answer", pa.int64())]))
    asked = [
        {
            "group_id": group,
            "messages": [{"role": "user", "content": f"question {group[1:]}"}],
            "prompt_text": "rendered",
            "prompt_ids": [1],
            "columns": {"answer": 0},
        }
        for group in groups
    ]
    answers = [
        {
            "rollout_id": f"r{index}",
            "group_id": groups[index],
            "sample_index": 0,
            "prompt_ids": [1],
            "completion_ids": [5] * (index + 1),
            "old_logprobs": [-0.5] * (index + 1),
            "finish_reason": "stop",
            "completion_text": answer,
            "temperature": 1.0,
            "seed": 0,
        }
        for index, answer in enumerate(texts)
    ]
    questions = write(store, "prompts", pa.Table.from_pylist(asked[::-1], schema=schema), run)
    speed = {"tokens": 66, "tokens_per_second": 1234.5}
    return write(
        store,
        "rollouts",
        pa.Table.from_pylist(answers, schema=rollouts.SCHEMA),
        run,
        speed,
        prompts=questions,
    )


def write_rewards(store: Store, sampled: Version, values: list[float | None]) -> Version:
    """Rewards of the rollouts, in another order than theirs; of two functions, the second always
    0."""
    rows = [
        {
            "rollout_id": f"r{index}",
            "group_id": f"g{index}",
            "reward": value,
            "parts": {"a": value, "b|`": 0.0},
            "errors": {"a": None, "b|`": None},
        }
        for index, value in enumerate(values)
    ]
    described = {
        "mean": 0.5,
        "std": None,
        "min": 0.0,
        "max": 1.0,
        "null": 0,
        "null_rate": 0.0,
        "errors": 0,
        "seconds": 0.1,
    }
    metrics = {
        "reward_mean": 1 / 3,
        "reward_null": 1,
        "functions": {"a": described, "b|`": described},
        "correlation": {"a b|`": 0.5},
    }
    table = pa.Table.from_pylist(rows[::-1], schema=rewards.schema_for(["a", "b|`"]))
    return write(store, "rewards", table, metrics=metrics, rollouts=sampled)


def outcome(version: Version, cached: bool = False) -> Outcome:
    return Outcome(str(version.ref), cached, version.manifest.rows, 1.0, version.manifest.metrics)


def finished(store: Store, stage: str, version: Version, cached: bool = False):
    """What the task of a stage does at its end."""
    return lambda: finish(Call(stage, {}, store.path, into="tiny"), outcome(version, cached))


# -- assets


def test_a_new_version_is_an_event_of_its_asset_and_a_cached_one_is_none(store):
    sampled = write_rollouts(store, ["a", "b"], run="events.1")
    assert shown(finished(store, "generate", sampled, cached=True)) == {}
    shown(finished(store, "generate", sampled))
    (event,) = events("events.1/rollouts@1")
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
        assert shown(lambda: finish(Call("generate", {}, store.path, into="tiny"), gone)) == {}
    (said,) = [record.getMessage() for record in caplog.records if record.name == "quiver"]
    assert "not on Prefect's pages: the event of tiny/rollouts@9 (LineageError" in said


# -- tables


def test_rollouts_hostile_ones_too(store):
    sampled = write_rollouts(store, HOSTILE)
    page = shown(finished(store, "generate", sampled))["rollouts-tiny"]
    assert (page["type"], len(page["data"])) == ("table", samples.ROWS)
    for row in page["data"]:
        number = row["tokens"] - 1
        assert row["prompt"] == f"`question {number}`" and row["finish_reason"] == "stop"
        spans = row["completion"].splitlines()
        assert spans and all(
            re.fullmatch(r"`[^`]+`", span) and span.isprintable() and len(span) <= 62
            for span in spans
        )
        assert sum(len(span) - 2 for span in spans) <= SPAN_LIMIT
    assert page["data"][0]["completion"] == f"`{HOSTILE[0]}`"
    said = f"**tiny/rollouts@1**: {len(HOSTILE)} rollouts, 66 tokens, 1234 tokens/s, "
    assert page["description"].startswith(said) and page["description"].endswith(
        "ended by stop 11. 10 samples:"
    )


def test_rewards_best_and_worst_joined_by_id(store):
    values = [0.1, 0.9, None, 0.3, 0.8, 0.2, 0.7, 0.6, 0.4, 0.5, 1.0, 0.0]
    sampled = write_rollouts(store, [f"answer {index}" for index in range(len(values))])
    pages = shown(finished(store, "reward", write_rewards(store, sampled, values)))
    ranked = pages["best-and-worst-tiny"]
    assert [row["reward"] for row in ranked["data"]] == [
        1.0,
        0.9,
        0.8,
        0.7,
        0.6,
        0.4,
        0.3,
        0.2,
        0.1,
        0.0,
    ]
    for row in ranked["data"]:
        number = values.index(row["reward"])
        assert (row["prompt"], row["completion"]) == (f"`question {number}`", f"`answer {number}`")
        assert (row["tokens"], row["parts"]) == (number + 1, f"`a` {row['reward']:.4g}\n`b|ˋ` 0")
    assert (
        ranked["description"]
        == "**tiny/rewards@1** by reward: the 5 best and the 5 worst of 11 rollouts with a reward"
    )
    a, b, reward = pages["rewards-tiny"]["data"]
    assert (a["function"], b["function"], reward["function"]) == ("`a`", "`b|ˋ`", "reward")
    assert (a["mean"], reward["mean"], reward["null"], a["std"]) == (0.5, 0.3333, 1, None)


@pytest.mark.parametrize(
    "values", [[], [None, None], [0.5, None]], ids=["no rows", "none scored", "one scored"]
)
def test_few_rows(store, values):
    sampled = write_rollouts(store, ["text"] * len(values))
    scored = write_rewards(store, sampled, values)
    stages = [finished(store, "generate", sampled), finished(store, "reward", scored)]
    pages = shown(lambda: [each() for each in stages])
    assert [row["reward"] for row in pages["best-and-worst-tiny"]["data"]] == [
        each for each in values if each is not None
    ]
    assert len(pages["rollouts-tiny"]["data"]) == len(values)


def test_only_the_first_shards_are_read(store, monkeypatch):
    """A page of a large dataset looks at the beginning alone: the rest may even be torn, which is
    for others to find."""
    monkeypatch.setattr(samples, "MOST_BYTES", 1)
    sampled = write_rollouts(store, ["text"] * (ROWS_PER_SHARD + 4))
    torn = sampled.files.folder / "part-00001.arrow"
    torn.write_bytes(torn.read_bytes()[:-8])
    page = shown(finished(store, "generate", sampled))["rollouts-tiny"]
    assert page["description"].endswith(
        f"10 samples among the first {ROWS_PER_SHARD} of {ROWS_PER_SHARD + 4}:"
    )
    assert max(row["tokens"] for row in page["data"]) <= ROWS_PER_SHARD


# -- pages


@pytest.fixture
def trained(store, policy, caplog, monkeypatch):
    """The second of two policies in a row, each of two steps; and the lines of its steps."""
    from quiver.stages.optimize import trainer
    from quiver.stages.optimize.stage import Config as OptimizeConfig
    from tests.stages.optimize import world

    monkeypatch.setattr(trainer, "_SECONDS_BETWEEN_LINES", -1)  # a line after each micro-batch
    config, made = (
        OptimizeConfig(learning_rate=1e-3, minibatches=2, token_budget=64, seed=1),
        [policy],
    )
    with caplog.at_level(logging.INFO, "quiver.stages"):
        for _ in range(2):
            sampled, scored = world.make(store, made[-1], world.even_share)
            refs = {"policy": made[-1].ref, "rollouts": sampled.ref, "rewards": scored.ref}
            ref = run_here("optimize", config, store, **refs)
            made.append(store.open(ref))
    said = [record.getMessage() for record in caplog.records]
    return made[-1], said[said.index(next(line for line in said if line.startswith("step 2:"))) :]


def test_policy_page_lineage_and_progress(store, trained):
    second, said = trained
    pages = shown(finished(store, "optimize", second))
    assert {key: page["type"] for key, page in pages.items()} == {
        "policy-tiny": "markdown",
        "lineage-tiny": "table",
    }
    markdown, audit = pages["policy-tiny"]["data"], second.manifest.metrics["audit"]
    assert (
        f"| mean_gap | {audit['mean_gap']:.4g} |" in markdown
        and "| steps |" in markdown
        and "| **total** |" in markdown
    )
    assert [len(line) for line in lines(drawn(markdown))] == [4] * 4, (
        "both policies' steps: loss, grad_norm, approx_kl, clip_fraction"
    )
    assert "`grpo`, 2 steps, " in pages["policy-tiny"]["description"]
    lineage = {row["version"]: row["made of"] for row in pages["lineage-tiny"]["data"]}
    assert lineage["tiny/policy@2"] == "policy@1, rollouts@2, rewards@2"
    assert set(lineage) == {"tiny/policy@2", "tiny/rollouts@2", "tiny/rewards@2"}
    assert events("tiny/policy@2", "tiny/advantages@2", "tiny/updates@2")
    bar, heard = progress_module.Bar(Call("optimize", {"minibatches": 2}, store.path)), []
    for line in said:
        bar.hear(line)
        heard.append(bar.percent)
    assert heard == sorted(heard) and {50.0, 100.0} <= set(heard)
    assert any(0 < percent < 50 for percent in heard), "within a step, too"


def test_a_link_to_the_report(store, policy):
    """Written where there is something new, linked to every time."""
    recipe, path = Linked("tiny", str(store.path)), store.path / "tiny/report.html"
    here = shown(lambda: link_report(recipe))["report-tiny"]
    assert (
        here["type"],
        path.as_uri() in here["data"],
        "<title>tiny · report" in path.read_text(),
    ) == ("markdown", True, True)
    written = path.stat().st_mtime_ns
    served = shown(lambda: link_report(recipe._replace(report_url="https://files.example/store/")))[
        "report-tiny"
    ]
    assert (
        "(https://files.example/store/tiny/report.html)" in served["data"]
        and path.stat().st_mtime_ns == written
    )


def test_evaluations_before_and_after(store, policy):
    from quiver.stages.evaluate.stage import Config as EvaluateConfig

    sampled = write_rollouts(store, ["a", "b", "c"])
    refs = []
    for values in ([0.0, 1.0, None], [1.0, 1.0, 0.5]):
        scored = write_rewards(store, sampled, values)
        measured = {"rollouts": sampled.ref, "rewards": scored.ref}
        refs.append(run_here("evaluate", EvaluateConfig(), store, **measured))
    other = run_here("evaluate", EvaluateConfig(score="a"), store, **measured)
    alone, after = (
        shown(finished(store, "evaluate", store.open(ref)))["evaluations-tiny"] for ref in refs
    )
    assert (
        alone["description"] == "**0.5 ± 0.5 (1 left out)** (no policy)"
        and "data:image" not in alone["data"]
    )
    assert (
        after["description"]
        == "**0.5 ± 0.5 (1 left out)** before (no policy), **0.8333 ± 0.17** after (no policy): +0.3333"
    )
    assert [len(line) for line in lines(drawn(after["data"]))] == [2]
    rows = [line for line in after["data"].splitlines() if line.startswith("| evaluations@")]
    assert rows == [
        "| evaluations@1 | no policy | 0.5 ± 0.5 (1 left out) | 2 | 0.5 |",
        "| evaluations@2 | no policy | 0.8333 ± 0.17 | 3 | 0.6667 |",
    ]
    assert (
        "before"
        not in shown(finished(store, "evaluate", store.open(other)))["evaluations-tiny"][
            "description"
        ]
    ), "another score is no earlier measurement"


def test_the_curve_of_a_run_is_one_page_that_grows():
    def done(number: int) -> dict:
        return {
            "iteration": number,
            "policy": "p",
            "reward_mean": number / 10,
            "evaluation": None,
            "seconds": {},
        }

    def run() -> None:
        curve = Curve("tiny")
        curve.show([done(1)], None)
        curve.show([done(1), done(2)], None)  # too soon
        curve.show([done(1), done(2), done(3)], None, last=True)

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
        Call("generate", {}, store.path, into="under.way"),
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
    call = Call("generate", {}, store.path, into="short")

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


@pytest.mark.parametrize(
    ("stage", "config", "said", "percent"),
    [
        ("prompt", {}, ["prompts: shard 1 of 4"], 25.0),
        ("reward", {}, ["rewards: shard 3 of 4", "length: 9 of 9"], 75.0),
        ("logprobs", {}, ["logprobs: 256 of 1024 rows"], 25.0),
        (
            "optimize",
            {"epochs": 2, "minibatches": 2},
            ["step 10: loss 0.1, grad_norm 1.0", "step 11: 1 of 2 micro-batches"],
            37.5,
        ),
        (
            "optimize",
            {"epochs": 1},
            ["step 3: loss nan, grad_norm nan", "step 3: loss 1, grad_norm 1"],
            100.0,
        ),
    ],
)
def test_lines_of_the_stages(store, stage, config, said, percent):
    bar = progress_module.Bar(Call(stage, config, store.path))
    for line in said:
        bar.hear(line)
    assert bar.percent == percent
