"""The rule of promotion on made-up numbers; no stage runs here."""

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from quiver.flows.approval import compared
from quiver.flows.promotion import Promotion, decide, entry_of, judge
from quiver.schemas.errors import ConflictError
from quiver.stages.common.store import Store
from tests.stages.common.store.test_store import Settings, commit


def metrics(score, stderr, n=400, k=None):
    told = {"score": score, "stderr": stderr, "n": n}
    return {
        "difference": {
            "score": told if k is None else {"score": -9.0, "stderr": 0.0, "n": n},
            "pass@k": {str(k): told},
        }
    }


@pytest.mark.parametrize(
    ("score", "stderr", "options", "better"),
    [
        (0.05, 0.02, {}, True),  # 0.05 − 1.645 · 0.02 = 0.0171
        (0.04, 0.02, {}, False),  # 0.0071
        (0.04, 0.02, {"confidence": 0.9}, True),  # 0.04 − 1.282 · 0.02 = 0.0144
        (0.04, 0.02, {"margin": 0.0}, True),
        (0.04, 0.02, {"confidence": 0.5, "margin": 0.04}, True),
        (0.04, 0.0, {"margin": 0.0401}, False),
        (0.0, 0.0, {"margin": 0.0}, False),  # the same policy is no better one
        (-0.2, 0.01, {"margin": 0.0}, False),
        (0.9, None, {"confidence": 0.5}, False),  # one prompt
    ],
)
def test_better_by_the_margin_and_by_more_than_chance(score, stderr, options, better):
    promotion = Promotion(**options)
    judged = judge(promotion, metrics(score, stderr))
    assert judged.better is better
    assert judged.numbers["difference"] == {"score": score, "stderr": stderr, "n": 400}
    assert (judged.numbers["margin"], judged.numbers["confidence"]) == (
        promotion.margin,
        promotion.confidence,
    )
    if stderr is not None:
        z = {0.5: 0.0, 0.9: 1.2815516, 0.95: 1.6448536}[promotion.confidence]
        assert judged.numbers["bound"] == pytest.approx(score - z * stderr, abs=1e-8)
    assert f"{score:+.4f}" in judged.why


def test_what_is_compared_may_be_pass_at_k():
    assert judge(Promotion(by="pass@4"), metrics(0.1, 0.01, k=4)).better
    for by in ("pass@0", "pass@", "reward"):
        with pytest.raises(ValidationError):
            Promotion(by=by)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tag": "latest"},
        {"tag": "../x"},
        {"margin": -0.1},
        {"confidence": 1.0},
        {"confidence": 0.4},
    ],
)
def test_what_is_no_promotion(wrong):
    with pytest.raises(ValueError):
        Promotion(**wrong)


def test_a_decision_is_made_once_and_only_on_what_was_compared_with(store):
    a, b, c = (str(commit(store, Settings(seed=seed)).ref) for seed in range(3))
    promotion = Promotion()
    store.tag("a", "prod", a)
    first = decide(store, "a", promotion, "night 1", a, b, "better", {"candidate": b})
    assert (first.before, first.ref, first.why, first.about) == (a, b, "better", {"candidate": b})
    assert decide(store, "a", promotion, "night 1", a, c, "mine", {}) == first
    with pytest.raises(ConflictError, match=f"expected {a}, found {b}") as caught:
        decide(store, "a", promotion, "night 2", a, c, "better", {"candidate": c})
    assert c in caught.value.state
    assert entry_of(store, "a", promotion, "night 2") is None
    kept = decide(store, "a", promotion, "night 3", b, b, "no better", {})
    assert kept.before == kept.ref == b


def test_who_is_asked_sees_the_comparison_and_the_answers_that_changed_most(tmp_path):
    shutil.copytree(Path(__file__).parents[1] / "golden/stores/finished", tmp_path / "store")
    store = Store(tmp_path / "store")
    shown = compared(store, "held/evaluations@4").splitlines()
    before, after = (
        store.open(f"held/evaluations@{n}").table()["score"].to_numpy() for n in (1, 4)
    )
    assert shown[0].startswith(
        "Over the 3 prompts that both have a score for: -0.0278, 95 % interval"
    )
    assert shown[0].endswith("; 0 prompts better, 2 worse, 1 equal.")
    rows = [line.strip("| ").split(" | ") for line in shown[4:]]
    gains = [float(row[6]) - float(row[4]) for row in rows]
    expected = after.astype(float) - before
    rising = sorted(expected[expected > 0], reverse=True)[:5]
    assert gains == pytest.approx([*rising, *sorted(expected[expected < 0])[:5]], abs=1e-4)
    assert [row[0] for row in rows] == ["better"] * len(rising) + ["worse"] * (
        len(rows) - len(rising)
    )
    texts = store.open("held/rollouts@1").table()["completion_text"].to_pylist()
    assert rows[0][3] == f"`{texts[4]}`"
    shutil.rmtree(tmp_path / "store/held/rollouts/v000001")
    assert compared(store, "held/evaluations@4") == "", "the rule's words are there all the same"
