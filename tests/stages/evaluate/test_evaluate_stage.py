"""The evaluate stage on stored rollouts and rewards: joined by id, null left out and counted,
lineage checked."""

import statistics

import pyarrow as pa
import pytest

from quiver.schemas import rewards
from quiver.schemas.errors import ConfigError, LineageError, NumericError
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.evaluate.config import IS_THE_SUM
from quiver.stages.evaluate.stage import Config
from quiver.stages.reward import stage as reward
from tests import episodes
from tests.stages.evaluate.held import ask, evaluate, score, write


def test_scores_are_joined_by_id_and_estimated_by_group(store):
    numbers = {"a": [1.0, 0.0, 0.0], "b": [1.0] * 3, "c": [0.0, None, 0.0], "d": [None] * 3}
    scored = score(store, numbers)
    version = evaluate(store, scored, k=(1, 2))
    assert str(version.ref) == "held/evaluations@1"
    columns = ["group_id", "sample_index", "score", "completion_tokens"]
    assert [tuple(row.values()) for row in version.table().select(columns).to_pylist()] == [
        (group, index, number, index + 1)
        for group, of_group in numbers.items()
        for index, number in enumerate(of_group)
    ]
    manifest = version.manifest
    assert manifest.status == {"scored": 8, "not_scored": 4}
    means = [1 / 3, 1, 0]
    mean = statistics.fmean(means)
    stderr = statistics.stdev(means) / 3**0.5
    expected = {"score": mean, "stderr": stderr, "n": 3, "num_groups": 4, "null": 4}
    assert {name: manifest.metrics[name] for name in expected} == pytest.approx(expected)
    assert manifest.metrics["pass@k"]["1"]["score"] == pytest.approx(mean)
    assert manifest.metrics["pass@k"]["2"]["score"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert evaluate(store, scored, k=(1, 2)).ref == version.ref
    assert evaluate(store, scored).ref.version == 2


def test_a_part_instead_of_the_reward_and_another_threshold(store):
    """0.7 as float32 is a little less than 0.7, and is correct at that threshold all the same."""
    scored = score(store, {"a": [0.1, 0.2], "b": [0.7, 0.0]})
    metrics = evaluate(store, scored, score="right", threshold=2.0).manifest.metrics
    assert metrics["score"] == pytest.approx(2.5)
    assert metrics["pass@k"]["1"]["score"] == pytest.approx(0.5)
    passes = evaluate(store, scored, threshold=0.7).manifest.metrics["pass@k"]
    assert passes["1"]["score"] == 0.25
    with pytest.raises(ConfigError, match="there are reward, right; did you mean right"):
        evaluate(store, scored, score="rigth")


def test_a_part_named_as_the_sum_is_not_the_score(store, caplog):
    sampled, paid = score(store, {"a": [1.0, 0.0, None]})
    rows = paid.table().to_pylist()
    schema = rewards.schema_for(["reward", "form"])
    for form, warned in ((0.0, []), (1.0, [IS_THE_SUM])):
        for row in rows:
            part = row["reward"]
            row["parts"] = {"reward": None if part is None else part - form, "form": form}
            row["errors"] = {}
        table = pa.Table.from_pylist(rows, schema=schema)
        scored = sampled, write(store, "rewards", table, inputs={"rollouts": sampled})
        caplog.clear()
        assert evaluate(store, scored).manifest.metrics["score"] == pytest.approx(0.5)
        assert [each.message for each in caplog.records if each.levelname == "WARNING"] == warned


def test_more_rows_than_a_shard(store):
    groups = {f"g{n:04d}": [float(n % 2)] for n in range(ROWS_PER_SHARD + 4)}
    version = evaluate(store, score(store, groups))
    assert version.table()["score"].to_pylist() == [x for (x,) in groups.values()]


def test_what_cannot_be_estimated_is_an_error(store):
    for groups in ({"a": [None, None]}, {}):
        with pytest.raises(NumericError, match=r"none of \d rollouts has a score"):
            evaluate(store, score(store, groups))
    scored = score(store, {"a": [1.0, None], "b": [0.0, 1.0]})
    words = r"evaluate.k 3.*no prompt has 3 scored samples, the most is 2"
    with pytest.raises(ConfigError, match=words):
        evaluate(store, scored, k=(3,))
    for k in ((0,), (2, 2)):
        with pytest.raises(ValueError, match="at least 1 and occur once"):
            Config(k=k)


def test_rewards_must_be_of_all_these_rollouts(store):
    first, _ = score(store, {"a": [1.0]})
    sampled, paid = score(store, {"a": [1.0, 0.0]})
    with pytest.raises(LineageError, match="was made of held/rollouts@2, not of held/rollouts@1"):
        evaluate(store, (first, paid))
    short = write(store, "rewards", paid.table().slice(1), inputs={"rollouts": sampled})
    with pytest.raises(LineageError, match="1 rows for 2 rollouts; 1 rollouts are missing"):
        evaluate(store, (sampled, short))


def test_the_difference_to_a_baseline_is_paired_by_prompt(store):
    """Groups are in another order, "d" and "e" have a score on one side only."""
    held_out = ask(store, dict.fromkeys("abcde", "?"))
    before = {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "d": [None] * 2, "e": [1.0] * 2}
    after = {"d": [1.0, 1.0], "c": [1.0, 1.0], "a": [1.0, 1.0], "b": [0.0, 1.0], "e": [None] * 2}
    base = evaluate(store, score(store, before, held_out), k=(1, 2))
    scored = score(store, after, held_out)
    version = evaluate(store, scored, base, k=(1, 2))
    assert version.manifest.input("baseline").ref == str(base.ref)
    metrics = version.manifest.metrics
    for numbers, differences in (
        (metrics["difference"]["score"], [0.5, 0.5, 0.0]),
        (metrics["difference"]["pass@k"]["2"], [0.0, 1.0, 0.0]),
    ):
        stderr = statistics.stdev(differences) / 3**0.5
        found = {name: numbers[name] for name in ("score", "stderr", "n")}
        assert found == pytest.approx({"score": 1 / 3, "stderr": stderr, "n": 3})
        assert numbers["interval"][0] < 0 < numbers["interval"][1] <= 1 and numbers["p"] > 0.05
    assert metrics["unpaired"] == 2
    assert metrics["baseline"]["score"] == pytest.approx(2.5 / 4)
    alone = evaluate(store, scored, k=(1, 2))
    assert alone.ref != version.ref and "difference" not in alone.manifest.metrics


def test_an_evaluation_that_was_scored_otherwise_is_no_baseline(store):
    """By another weight, or with a person's overrides; the number of workers does not matter."""
    sampled, paid = score(store, {"a": [1.0], "b": [0.0]}, ask(store, {"a": "?", "b": "?"}))

    def evaluated(baseline=None, stage="reward", weight=1.0, workers=1):
        config = reward.Config(functions=[{"use": "numeric", "weight": weight}], workers=workers)
        plan = {"inputs": {"rollouts": sampled}, "stage": stage, "config": config}
        other = write(store, "rewards", paid.table().combine_chunks(), **plan)
        return evaluate(store, (sampled, other), baseline, force=True)

    base = evaluated()
    assert evaluated(base, workers=2).manifest.metrics["difference"]["score"]["score"] == 0
    for changed in ({"weight": 2.0}, {"stage": "override"}):
        words = "cannot be the baseline: it was scored differently, by held/rewards@2"
        with pytest.raises(LineageError, match=words):
            evaluated(base, **changed)


def test_an_evaluation_of_other_prompts_or_scores_is_no_baseline(store):
    held_out = ask(store, {"a": "?", "b": "?"})
    scored = score(store, {"a": [1.0], "b": [None]}, held_out)
    for prompts in (ask(store, {"a": "?", "c": "?"}), None):
        foreign = evaluate(store, score(store, {"a": [1.0], "b": [0.0]}, prompts))
        words = r"cannot be the baseline: its prompts are .*, expected held/prompts@1"
        with pytest.raises(LineageError, match=words):
            evaluate(store, scored, foreign)
    with pytest.raises(LineageError, match="is not a version of evaluations"):
        evaluate(store, scored, held_out)
    strict = evaluate(store, scored, threshold=0.5)
    with pytest.raises(
        LineageError, match=r"cannot be the baseline: it measured .*0.5.*expected .*1.0"
    ):
        evaluate(store, scored, strict)
    other = evaluate(store, score(store, {"a": [None], "b": [1.0]}, held_out))
    with pytest.raises(NumericError, match="no prompt has a score here and in"):
        evaluate(store, scored, other)


def test_an_episode_that_was_not_scored_is_in_no_share_of_successes(store, policy):
    rows = [episodes.row(f"a-{n}", [episodes.turn(1)] * n) for n in (1, 2, 3)]
    sampled = episodes.write(store, policy, rows, "held")
    earned = {"a-1": [1.0], "a-2": [0.0, 0.0], "a-3": None}
    paid = episodes.write_rewards(store, sampled, lambda row: earned[row["rollout_id"]], "held")
    steps = evaluate(store, (sampled, paid)).manifest.metrics["turns_to_success"]
    assert steps == {"mean": 1.0, "median": 1.0, "n": 1, "within": {"1": 0.5}}


@pytest.mark.parametrize(
    ("unscored", "means", "number"),
    [
        ("zero", [0.5, -0.5, 0.0], 0.0),
        ("worst", [-0.5, -3.5 / 3, -2.0], -2.0),
        ("leave_out", [1.0, -0.75], None),
    ],
)
def test_an_answer_that_a_limit_cut_off_counts_by_the_rule(store, unscored, means, number):
    """a-2 and c-2 stopped by themselves, and c-1 failed: all are left out in any case."""
    groups = {"a": [1.0, None, None], "b": [None, 0.5, -2.0], "c": [None, None, None]}
    cut = ("a-1", "b-0", "b-2", "c-0", "c-1")
    version = evaluate(store, score(store, groups, cut=cut, failed=("c-1",)), unscored=unscored)
    stderr = statistics.stdev(means) / len(means) ** 0.5
    expected = {"score": statistics.fmean(means), "stderr": stderr, "n": len(means)}
    expected |= {"null": 6, "limited": 0}
    if number is not None:
        expected |= {"null": 3, "limited": 3, "limited_score": number}
    metrics = version.manifest.metrics
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    assert ("limited_score" in metrics) == (number is not None)
    assert version.manifest.status == {"scored": 3, "not_scored": 6}
    scores = version.table()["score"].to_pylist()
    assert scores == [1.0, number, None, number, 0.5, -2.0, number, None, None]


def test_the_rule_zero_is_the_default_and_makes_no_answer_correct():
    assert Config() == Config(unscored="zero")
    for threshold in (0.0, -0.5):
        with pytest.raises(ValueError, match='unscored = "worst" or "leave_out"'):
            Config(threshold=threshold)
        assert Config(threshold=threshold, unscored="worst").threshold == threshold


def test_the_worst_score_is_at_most_zero(store):
    version = evaluate(store, score(store, {"a": [1.0, None]}, cut=("a-1",)), unscored="worst")
    assert version.table()["score"].to_pylist() == [1.0, 0.0]


@pytest.mark.parametrize("threshold", [0.0, -0.5, 0.7, 1.0])
def test_a_cut_answer_is_never_correct(store, threshold):
    """With the rule `worst` it scores below the threshold, even if all others score above."""
    scored = score(store, {"a": [1.0, None]}, cut=("a-1",))
    version = evaluate(store, scored, unscored="worst", threshold=threshold)
    metrics = version.manifest.metrics
    assert metrics["pass@k"]["1"]["score"] == 0.5
    assert metrics["limited_score"] == pytest.approx(min(0.0, threshold), abs=1e-6)
    assert metrics["limited_score"] < max(threshold, 1e-9)
    assert metrics["score"] == pytest.approx((1 + min(0.0, threshold)) / 2)


def test_an_error_of_another_scorer_leaves_no_cut_answer_out(store):
    """Only of the part that is evaluated; the reward is of both."""
    sampled, paid = score(store, {"a": [None, 1.0]}, cut=("a-0",))
    rows = paid.table().to_pylist()
    for row in rows:
        row["parts"]["style"] = None
        row["errors"]["style"] = "ValueError"
    table = pa.Table.from_pylist(rows, schema=rewards.schema_for(["right", "style"]))
    paid = write(store, "rewards", table, inputs={"rollouts": sampled})
    for name, limited in (("right", 1), ("reward", 0)):
        metrics = evaluate(store, (sampled, paid), score=name).manifest.metrics
        assert (metrics["limited"], metrics["null"]) == (limited, 1 - limited)


def test_a_policy_that_is_cut_off_more_often_is_not_better(store):
    """All pairs count, so n is the number of prompts; the worst score is never better than the
    baseline's."""
    held_out = ask(store, dict.fromkeys("abcd", "?"))
    before = score(store, {"a": [0.0], "b": [1.0], "c": [-3.0], "d": [1.0]}, held_out)
    groups = {"a": [None], "b": [1.0], "c": [None], "d": [None]}
    after = score(store, groups, held_out, cut=("a-0", "c-0", "d-0"))
    for unscored, differences in {
        "zero": [0, 0, 3, -1],
        "worst": [-3, 0, 0, -4],
        "leave_out": [0],
    }.items():
        base = evaluate(store, before, unscored=unscored)
        metrics = evaluate(store, after, base, unscored=unscored).manifest.metrics
        difference = metrics["difference"]["score"]
        assert difference["score"] == pytest.approx(statistics.fmean(differences))
        assert difference["n"] == len(differences) == 4 - metrics["unpaired"]


def test_episodes_that_any_limit_ended_count_and_failed_ones_do_not(store, policy):
    limits = ("max_turns", "max_tokens", "context", "max_tool_calls", "max_images", "max_audio")
    others = ("answered", "environment", "parse_error", "timeout", "environment_error")
    rows = [
        episodes.row(f"{reason}-0", [episodes.turn(1)], end_reason=reason)
        for reason in (*limits, *others)
    ]
    rows.append(episodes.row("paid-0", [episodes.turn(1)], end_reason="max_turns"))
    sampled = episodes.write(store, policy, rows, "held")
    paid = episodes.write_rewards(
        store, sampled, lambda row: [0.5] if row["group_id"] == "paid" else None, "held"
    )
    scores = evaluate(store, (sampled, paid)).table()["score"].to_pylist()
    assert scores == [0.0] * len(limits) + [None] * len(others) + [0.5]
