"""The table of nights, from a tag's history; and the curve of nights with rows of their own."""

import pytest

from quiver.flows.look import stage as report
from quiver.flows.look.gather import gather
from quiver.flows.look.nights import HEADER, NightRow, nights_of, table_of
from quiver.stages.core.store.tags import Entry
from quiver.stages.evaluate.stage import Config
from tests.benchmarks.made import make_prompts, make_rewards, rollouts_table, tiny_policy
from tests.benchmarks.made import write_version as write
from tests.flows.test_report import CONFIG, Page, evaluate, model_entry, optimize

DIFFERENCE = {"score": 0.05, "stderr": 0.02, "n": 400}
NUMBERS = {"by": "score", "difference": DIFFERENCE, "bound": 0.0171}


def entry(before, ref, why, **about):
    return Entry(at="2026-11-20T02:30:59.123", before=before, ref=ref, why=why, about=about)


ENTRIES = [
    entry(None, "a/policy@0", "the base model", night="one", decision="began", author="quiver"),
    entry(
        "a/policy@0", "a/policy@1", "ada said yes: good",
        night="one", decision="promoted", candidate="a/policy@1", author="ada", **NUMBERS,
    ),
    entry(
        "a/policy@1", "a/policy@1", "no better",
        night="two", decision="rejected", candidate="a/policy@2", author="quiver",
        watch=["approx. KL 4.62", "entropy 2.65 → 0.99"], **{**NUMBERS, "by": "pass@4"},
    ),
    entry("a/policy@1", "a/policy@2", "reads better"),
    entry(
        "a/policy@2", "a/policy@1", "the one before is better",
        night="three", decision="rolled back", candidate="a/policy@1", author="quiver",
        by="score", difference={"score": 0.5, "stderr": None, "n": 1}, bound=None,
    ),
]  # fmt: skip


def test_a_row_a_decision_and_rejected_nights_are_rows_too():
    when = "2026-11-20 02:30"
    zero, one, two = (f"a/policy@{number}" for number in range(3))
    told = "+0.0500 ± 0.0200, at least +0.0171"
    assert nights_of(ENTRIES) == [
        NightRow("one", when, "none", zero, "began", "", "", "quiver", "the base model"),
        NightRow("one", when, zero, one, "promoted", told, "", "ada", "ada said yes: good"),
        NightRow(
            "two", when, one, two, "rejected", f"pass@4 {told}",
            "approx. KL 4.62; entropy 2.65 → 0.99", "quiver", "no better",
        ),
        NightRow("", when, one, two, "set by hand", "", "", "", "reads better"),
        NightRow(
            "three", when, two, one, "rolled back", "+0.5000, of one prompt", "", "quiver",
            "the one before is better",
        ),
    ]  # fmt: skip


def test_a_tag_that_was_moved_by_hand_has_no_columns_of_nights():
    by_hand = [
        entry(None, "a/policy@1", "", author="ada"),
        entry("a/policy@1", "a/policy@2", "reads better", author="ada"),
    ]
    when = "2026-11-20 02:30"
    assert table_of(nights_of(by_hand)) == [
        ("when", "before", "now", "decision", "who", "why"),
        (when, "none", "a/policy@1", "set by hand", "ada", ""),
        (when, "a/policy@1", "a/policy@2", "set by hand", "ada", "reads better"),
    ]
    assert table_of(nights_of(ENTRIES)) == [HEADER, *nights_of(ENTRIES)]


@pytest.mark.parametrize(
    "about",
    [{"night": 3}, {"difference": "high"}, {"watch": {"a": 1}}, {"decision": None}, {"other": [1]}],
)
def test_notes_in_another_form_are_left_out(about):
    (night,) = nights_of([entry("a/policy@1", "a/policy@2", "why\x1b[0m", **about)])
    assert night.decision == "set by hand" and night.why == "why\\x1b[0m"


def test_no_cell_of_a_night_writes_control_characters():
    foreign = "a\x1b[31m\n"
    about = dict.fromkeys(("night", "decision", "candidate", "author"), foreign)
    numbers = {**NUMBERS, "by": foreign, "watch": [foreign]}
    (night,) = nights_of([entry(foreign, foreign, foreign, **about, **numbers)])
    assert [cell for cell in night if not cell.isprintable()] == []


def test_a_difference_without_a_bound_names_none():
    (night,) = nights_of([entry("a/policy@1", "a/policy@2", "why", difference=DIFFERENCE)])
    assert night.difference == "+0.0500, of one prompt"


@pytest.fixture
def spent(store):
    """Two nights of a tiny model; each measured the policy in use and the candidate on rows that
    are those of the night."""

    def measured(policy, asked, baseline=None):
        models = (model_entry("policy", policy),)
        table = rollouts_table(8, 8, 8, 2)
        rolled = write(store, "rollouts", "generate", table, {"prompts": asked}, models)
        paid = make_rewards(store, rolled)
        refs = {"rollouts": rolled.ref, "rewards": paid.ref}
        extra = {"baseline": baseline} if baseline else {}
        return refs, evaluate(Config(), store, **refs, **extra, force=True)

    def spend(same_rows):
        policy = tiny_policy(store)
        store.tag("bench", "prod", policy.ref)
        for night in (1, 2):
            asked = make_prompts(store, 4 if same_rows else 3 + night)
            refs, before = measured(policy, asked)
            candidate = store.open(optimize(CONFIG, store, policy=policy.ref, **refs))
            _, after = measured(candidate, asked, before)
            about = {"night": f"n{night}", "decision": "promoted", "evaluation": str(after)}
            store.tag("bench", "prod", candidate.ref, key=f"night n{night}", about=about)
            policy = candidate

    return spend


def test_nights_with_rows_of_their_own_have_a_point_each_beside_their_baseline(store, spent):
    spent(same_rows=False)
    found = gather(store, "bench")
    assert [each.ref for each in found.nightly] == ["bench/evaluations@2", "bench/evaluations@4"]
    panel = report.curves_of(found)[0]
    metrics = [store.open(f"bench/evaluations@{n}").manifest.metrics for n in (1, 2, 3, 4)]
    points = [(x, m["score"], m["stderr"]) for x, m in zip((1, 1, 2, 2), metrics, strict=True)]
    assert panel.title == "held-out score; dashed: in use"
    assert (list(panel.points), list(panel.beside)) == (points[1::2], points[::2])
    page = Page(report.render(store, found))
    rows = [row for row in page.rows if row[:1] in (["n1"], ["n2"])]
    assert [(row[0], row[2], row[3], row[4]) for row in rows] == [
        ("n2", "bench/policy@1", "bench/policy@2", "promoted"),
        ("n1", "bench/policy@0", "bench/policy@1", "promoted"),
    ]


def test_nights_on_the_same_rows_are_one_curve_by_policy(store, spent):
    spent(same_rows=True)
    found = gather(store, "bench")
    assert found.nightly == [] and set(found.nights) == {"prod"}
    assert report.curves_of(found)[0].title == "held-out score"
