"""The rule of promotion on made-up numbers; no stage runs here."""

from statistics import NormalDist

import pyarrow as pa
import pytest

from quiver.flows.promotion import Promotion, decide, entry_of, judge, moved
from quiver.schemas import evaluations
from quiver.schemas.errors import ConflictError
from quiver.stages.core.config import Config
from quiver.stages.evaluate.estimators import differences
from quiver.stages.turns.statistics import LIMITS
from tests.benchmarks.made import rollouts_table
from tests.stages.core.store.test_store import Settings, commit
from tests.writing import begin


def metrics(score, stderr, n=400, k=None):
    p = 2 * NormalDist().cdf(-abs(score) / stderr) if stderr else 1.0
    told = {"score": score, "stderr": stderr, "n": n, "p": p}
    return {
        "difference": {
            "score": told if k is None else {"score": -9.0, "stderr": 0.0, "n": n, "p": 1.0},
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
    if stderr is not None:
        t = {0.5: 0.0, 0.9: 1.2837, 0.95: 1.6487}[promotion.confidence]  # 399 degrees of freedom
        assert judged.numbers["bound"] == pytest.approx(score - t * stderr, abs=1e-4 * stderr)
    assert f"{score:+.4f}" in judged.why


@pytest.mark.parametrize(("num_prompts", "better"), [(2, False), (3, False), (4, True)])
def test_equal_differences_of_few_prompts_may_be_chance(num_prompts, better):
    """They have no standard error: two prompts that both went from 0 to 1 are no certainty."""
    after, before = ({f"g{row}": [score] for row in range(num_prompts)} for score in (1.0, 0.0))
    compared = {"difference": differences(after, before, [1], (1.0, 1.0))}
    for by in ("score", "pass@1"):
        judged = judge(Promotion(by=by), compared)
        assert judged.better is better
        assert ("may differ by chance" in judged.why) is not better
    assert judge(Promotion(confidence=0.5), compared).better


def test_what_is_compared_may_be_pass_at_k():
    assert judge(Promotion(by="pass@4"), metrics(0.1, 0.01, k=4)).better
    for wrong in ({"by": "pass@0"}, {"by": "reward"}, {"tag": "latest"}, {"confidence": 0.4}):
        with pytest.raises(ValueError):
            Promotion(**wrong)


def test_a_decision_is_made_once_and_only_on_what_was_compared_with(store):
    a, b, c = (str(commit(store, Settings(seed=seed)).ref) for seed in range(3))
    promotion = Promotion()
    store.tag("a", "prod", a)

    def decided(key, before, ref, why, **about):
        return decide(store, "a", promotion, key=key, before=before, ref=ref, why=why, about=about)

    first = decided("night 1", a, b, "better", candidate=b)
    assert (first.before, first.ref, first.why, first.about) == (a, b, "better", {"candidate": b})
    assert decided("night 1", a, c, "mine") == first
    with pytest.raises(ConflictError, match=f"expected {a}, found {b}") as caught:
        decided("night 2", a, c, "better", candidate=c)
    assert caught.value.state.endswith(f"{c} is still in the store.")
    assert entry_of(store, "a", promotion, "night 2") is None
    rejected = decided("night 3", b, b, "no better")
    assert rejected.before == rejected.ref == b


def test_what_the_difference_leaves_out_stands_beside_it():
    told = metrics(0.05, 0.02) | {"unpaired": 2, "null": 1, "limited": 0}
    told |= {"baseline": {"null": 0, "limited": 3, "limited_score": 0.0}}
    why = judge(Promotion(), told).why
    assert why.endswith(
        "; 2 prompts left out, scored on one side only; candidate: (1 left out); in use: (3 cut off "
        "count as 0)"
    )
    assert judge(Promotion(), metrics(0.05, 0.02)).why.endswith("margin 0.01")


# -- how far a candidate moved


class Noted(Config):
    """Tells versions apart."""

    name: str


def noted(store, kind, name, *, inputs=None, **about):
    """A version of `kind` that is whole only in its manifest."""
    options = {"stage": name, "stage_version": 1, "config": Noted(name=name), "force": True}
    with begin(store, "a", kind, inputs=inputs or {}, **options) as work:
        if "rows" in about:
            work.write_table(about.pop("rows"))
        if kind == "policy":
            (work.folder / "config.json").write_text("{}")
        return work.commit(**about)


def answers(store, name, *, cut=0, ends=None, length=10.0):
    """Rollouts of ten answers, `cut` of them cut off by a limit, of this mean length. `ends`: how
    many episodes were cut off by each limit instead."""
    told = {"mean_completion_tokens": length}
    status = {"length": cut, "stop": 10 - cut}
    if ends:
        told["end_reasons"] = {**ends, "answered": 10 - sum(ends.values())}
        status = {"stop": 10}
    rows = rollouts_table(10, 10, 2, 1)
    return noted(store, "rollouts", name, rows=rows, metrics=told, status=status)


def moved_by(store, steps=(), before=None, after=None, **options):
    """What is told of a candidate whose optimizer steps had these KLs and entropies, and whose
    held-out answers were these."""
    in_use = policy = noted(store, "policy", "in use")
    for number, (kl, entropy) in enumerate(steps):
        told = {"approx_kl": kl, "entropy": entropy}
        policy = noted(store, "policy", f"step {number}", inputs={"policy": policy}, metrics=told)
    before, after = (
        answers(store, name, **about or {}) for name, about in (("b", before), ("a", after))
    )
    rows = evaluated_rows()
    base = noted(store, "evaluations", "base", rows=rows, inputs={"rollouts": before}, metrics=ONE)
    inputs = {"rollouts": after, "baseline": base}
    measured = noted(store, "evaluations", "night", rows=rows, inputs=inputs, metrics=ONE)
    refs = (str(version.ref) for version in (in_use, policy, measured))
    return moved(Promotion(**options), store, *refs)


ONE = {"score": 0.5, "stderr": None, "n": 1}


def evaluated_rows():
    names = evaluations.SCHEMA.names
    row = dict(zip(names, ("g", 0, "g-0", 0.5, 3, "stop"), strict=True))
    return pa.Table.from_pylist([row], schema=evaluations.SCHEMA)


@pytest.mark.parametrize(
    ("about", "options", "beyond_limits"),
    [
        ({}, {}, []),
        (
            {"steps": [(4.62, 2.65), (0.1, 0.99)]},
            {},
            [
                "approx. KL 4.62 nats per token (promotion.max_kl 1)",
                "entropy 2.65 → 0.99 nats per token (promotion.max_entropy_drop 1)",
            ],
        ),
        ({"steps": [(1.0, 2.0), (0.0, 1.0)]}, {}, []),
        (
            {"steps": [(None, None)]},
            {},
            [
                "approx. KL inf nats per token (promotion.max_kl 1)",
                "entropy – → – nats per token (promotion.max_entropy_drop 1)",
            ],
        ),
        ({"steps": [(None, None)]}, {"max_kl": None, "max_entropy_drop": None}, []),
        (
            {"before": {"cut": 2}, "after": {"cut": 10}},
            {},
            ["20% → 100% of the held-out answers cut off by a limit (promotion.max_truncated 0.8)"],
        ),
        (
            {"after": {"ends": {"context": 1}}},
            {"max_truncated": 0.0},
            ["0% → 10% of the held-out answers cut off by a limit (promotion.max_truncated 0)"],
        ),
        ({"before": {"cut": 9}, "after": {"cut": 10}}, {}, []),
        ({"before": {"cut": 8}, "after": {"cut": 8}}, {}, []),
        (
            {"after": {"length": 2.0}},
            {},
            ["mean length 10 → 2 tokens (promotion.max_length_change 4)"],
        ),
        (
            {"after": {"length": 41.0}},
            {},
            ["mean length 10 → 41 tokens (promotion.max_length_change 4)"],
        ),
        ({"after": {"length": 40.0}}, {}, []),
        ({"after": {"length": 0.0}}, {"max_length_change": None}, []),
    ],
)
def test_what_is_beyond_its_limit_is_told_with_its_key(store, about, options, beyond_limits):
    assert moved_by(store, **about, **options).beyond_limits == beyond_limits


def test_how_far_it_moved_is_told_in_any_case(store):
    told = moved_by(store, [(0.0, 2.0), (0.5, 1.5)], {"cut": 1}, {"cut": 3, "length": 12.0}).numbers
    assert told == {
        "kl": 0.5,
        "entropy": [2.0, 1.5],
        "truncated": [0.1, 0.3],
        "mean_length": [10.0, 12.0],
    }


def test_each_limit_of_an_episode_cuts_its_answer_off(store):
    cut_off = {"ends": dict.fromkeys(LIMITS, 1)}
    share = len(LIMITS) / 10
    assert moved_by(store, before=cut_off, after=cut_off).numbers["truncated"] == [share, share]
