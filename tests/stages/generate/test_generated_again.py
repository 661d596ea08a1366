"""Generated episodes are played again, and gone on with from a turn: what is sampled from there is
generate's own."""

# ruff: noqa: F811 - the fixtures of another file
from __future__ import annotations

import json

from quiver.stages.turns.reenact import reenact
from tests.stages.generate import guessing
from tests.stages.generate.test_turns_generated import config, names, policy, store  # noqa: F401
from tests.writing import run_here


def test_generated_episodes_go_on_from_a_turn(store, policy, names):
    prompts = guessing.render(store, policy, names)
    first = store.open(
        run_here("generate", config(names), store, prompts=prompts.ref, policy=policy.ref)
    )
    report = reenact(store, str(first.ref), processes=1)
    assert report.episodes == report.episodes_agree == len(first.table()) > 0
    branch = run_here("branch", {"turn": 1}, store, into="cut", rollouts=first.ref)
    again = store.open(
        run_here("generate", config(names), store, prompts=branch, policy=policy.ref)
    )
    rows = again.table().to_pylist()
    longer = [row for row in first.table().to_pylist() if len(row["turns"]) > 1]
    assert len(rows) == 3 * len(longer)
    assert {row["end_reason"] for row in rows} <= {"environment", "max_turns"}
    report = reenact(store, str(again.ref), processes=1)
    assert report.episodes == report.episodes_agree == len(rows) and not report.is_changed


def test_a_place_that_is_reached_otherwise_than_before_is_not_gone_on_from(
    store, policy, names, monkeypatch
):
    prompts = guessing.render(store, policy, names)
    first = store.open(
        run_here("generate", config(names), store, prompts=prompts.ref, policy=policy.ref)
    )
    branch = run_here("branch", {"turn": 1}, store, into="elsewhere", rollouts=first.ref)
    monkeypatch.setenv("OTHER_HINTS", "yes")
    version = store.open(
        run_here("generate", config(names), store, prompts=branch, policy=policy.ref)
    )
    rows = version.table().to_pylist()
    assert {row["end_reason"] for row in rows} == {"environment_error"}
    assert "than when its prompt" in json.loads(rows[0]["turns"][-1]["info"])["quiver_failure"]
