"""Generated episodes are played again, and gone on with from a turn: what is sampled from there is
generate's own."""

from __future__ import annotations

from quiver.stages.generate.turns.reenact import reenact
from tests.stages.generate import guessing
from tests.stages.generate.test_turns_generated import config, names, policy, run, store  # noqa: F401
from tests.writing import run_here


def test_generated_episodes_go_on_from_a_turn(store, policy, names):  # noqa: F811
    prompts = guessing.render(store, policy, names)
    first = store.open(run(config(names), store, prompts=prompts.ref, policy=policy.ref))
    report = reenact(store, str(first.ref), processes=1)
    assert report.episodes == report.episodes_agree == len(first.table()) > 0
    branch = run_here("branch", {"turn": 1}, store, into="cut", rollouts=first.ref)
    again = store.open(run(config(names), store, prompts=branch, policy=policy.ref))
    rows = again.table().to_pylist()
    longer = [row for row in first.table().to_pylist() if len(row["turns"]) > 1]
    assert len(rows) == 3 * len(longer)
    assert {row["end_reason"] for row in rows} <= {"environment", "max_turns"}
    report = reenact(store, str(again.ref), processes=1)
    assert report.episodes == report.episodes_agree == len(rows) and not report.is_changed
