"""The evaluate stage on stored rollouts and rewards: joined by id, null left out and counted,
lineage checked."""

import json
import statistics

import pyarrow as pa
import pytest

from quiver.schemas import fields, prompts, rewards, rollouts
from quiver.schemas.errors import ConfigError, LineageError, NumericError
from quiver.stages.common import config as common
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store.writer import ROWS_PER_SHARD
from quiver.stages.evaluate.stage import Config
from quiver.stages.reward import stage as reward
from tests import episodes
from tests.writing import begin


def run(config, store, **options):
    return run_stage("evaluate", config, store, in_process=True, **options)


def write(store, kind, table, inputs=None, stage="test", config=None):
    about = {
        "stage": stage,
        "stage_version": 1,
        "config": config or common.Config(),
        "inputs": inputs or {},
    }
    with begin(store, "held", kind, **about, force=True) as work:
        for index, start in enumerate(range(0, max(1, table.num_rows), ROWS_PER_SHARD)):
            work.write(index, table.slice(start, ROWS_PER_SHARD))
        return work.commit()


@pytest.fixture
def scored(store):
    """Make rollouts and their rewards (in another order) from scores by group; part `right` is the
    score times ten."""

    def make(groups: dict[str, list[float | None]], prompts=None, cut=(), failed=()):
        """`cut`: rollouts `GROUP-INDEX` that ended at the token limit; `failed`: those whose scorer
        raised an error."""
        rows = [
            (group, at, score)
            for group, scores in groups.items()
            for at, score in enumerate(scores)
        ]
        lists = {
            name: rollouts.SCHEMA.field(name).type
            for name in ("prompt_ids", "completion_ids", "old_logprobs")
        }
        sampled = pa.table(
            {
                "rollout_id": [f"9-{group}-{at}" for group, at, _ in rows],
                "group_id": [group for group, *_ in rows],
                "sample_index": pa.array([at for _, at, _ in rows], pa.int32()),
                "prompt_ids": pa.array([[1]] * len(rows), lists["prompt_ids"]),
                "completion_ids": pa.array(
                    [[7] * (at + 1) for _, at, _ in rows], lists["completion_ids"]
                ),
                "old_logprobs": pa.array(
                    [[-0.5] * (at + 1) for _, at, _ in rows], lists["old_logprobs"]
                ),
                "finish_reason": [
                    "length" if f"{group}-{at}" in cut else "stop" for group, at, _ in rows
                ],
                "stop_reason": pa.nulls(len(rows), pa.string()),
                "completion_text": ["x"] * len(rows),
                "temperature": pa.array([1.0] * len(rows), pa.float32()),
                "seed": pa.array([0] * len(rows), pa.int64()),
            },
            schema=rollouts.SCHEMA,
        )
        version = write(store, "rollouts", sampled, {"prompts": prompts} if prompts else {})
        table = pa.Table.from_pylist(
            [
                {
                    "rollout_id": f"9-{group}-{at}",
                    "group_id": group,
                    "reward": score,
                    "parts": {"right": None if score is None else score * 10},
                    "errors": {"right": "ValueError" if f"{group}-{at}" in failed else None},
                }
                for group, at, score in reversed(rows)
            ],
            schema=rewards.schema_for(["right"]),
        )
        return version, write(store, "rewards", table, {"rollouts": version})

    return make


def test_scores_are_joined_by_id_and_estimated_by_group(store, scored):
    sampled, paid = scored(
        {"a": [1.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0], "c": [0.0, None, 0.0], "d": [None, None, None]}
    )
    ref = run(Config(k=(1, 2)), store, rollouts=sampled.ref, rewards=paid.ref)
    assert str(ref) == "held/evaluations@1"
    rows = store.open(ref).table().to_pylist()
    assert [(row["group_id"], row["sample_index"], row["score"], row["completion_tokens"]) for row in rows[:3]] == [
        ("a", 0, 1.0, 1), ("a", 1, 0.0, 2), ("a", 2, 0.0, 3),
    ]  # fmt: skip
    assert rows[7]["score"] is None
    manifest = store.open(ref).manifest
    assert manifest.status == {"scored": 8, "not_scored": 4}
    means = [1 / 3, 1, 0]
    mean = sum(means) / 3
    stderr = (sum((m - mean) ** 2 for m in means) / 2 / 3) ** 0.5
    expected = {"score": mean, "stderr": stderr, "n": 3, "num_groups": 4, "null": 4}
    assert {name: manifest.metrics[name] for name in expected} == pytest.approx(expected)
    assert manifest.metrics["pass@k"]["1"]["score"] == pytest.approx(mean)
    assert manifest.metrics["pass@k"]["2"]["score"] == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert run(Config(k=(1, 2)), store, rollouts=sampled.ref, rewards=paid.ref) == ref
    assert run(Config(), store, rollouts=sampled.ref, rewards=paid.ref).version == 2


def test_a_part_instead_of_the_reward_and_another_threshold(store, scored):
    sampled, paid = scored({"a": [0.1, 0.2], "b": [0.3, 0.0]})
    metrics = store.open(
        run(Config(score="right", threshold=2.0), store, rollouts=sampled.ref, rewards=paid.ref)
    ).manifest.metrics
    assert metrics["score"] == pytest.approx(1.5)
    assert metrics["pass@k"]["1"]["score"] == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="there are reward, right; did you mean right"):
        run(Config(score="rigth"), store, rollouts=sampled.ref, rewards=paid.ref)


def test_a_score_is_at_least_the_threshold_that_it_was_written_as(store, scored):
    """0.7 as float32 is a little less than 0.7."""
    sampled, paid = scored({"a": [0.7, 0.0]})
    metrics = store.open(
        run(Config(threshold=0.7), store, rollouts=sampled.ref, rewards=paid.ref)
    ).manifest.metrics
    assert metrics["pass@k"]["1"]["score"] == 0.5


def test_one_group_has_a_score_and_no_error(store, scored):
    sampled, paid = scored({"a": [1.0]})
    manifest = store.open(run(Config(), store, rollouts=sampled.ref, rewards=paid.ref)).manifest
    assert manifest.metrics["stderr"] is None
    assert json.loads(manifest.to_json())["metrics"]["n"] == 1


def test_more_rows_than_a_shard(store, scored):
    sampled, paid = scored({f"g{n:04d}": [float(n % 2)] for n in range(ROWS_PER_SHARD + 4)})
    version = store.open(run(Config(), store, rollouts=sampled.ref, rewards=paid.ref))
    assert version.manifest.rows == ROWS_PER_SHARD + 4
    assert version.table().column("score").to_pylist() == [
        float(n % 2) for n in range(ROWS_PER_SHARD + 4)
    ]


def test_nothing_scored_is_an_error(store, scored):
    for groups in ({"a": [None, None]}, {}):
        sampled, paid = scored(groups)
        with pytest.raises(NumericError, match=r"none of \d rollouts has a score"):
            run(Config(), store, rollouts=sampled.ref, rewards=paid.ref)


def test_too_large_a_k(store, scored):
    sampled, paid = scored({"a": [1.0, None], "b": [0.0, 1.0]})
    with pytest.raises(
        ConfigError, match=r"evaluate.k 3.*no prompt has 3 scored samples, the most is 2"
    ):
        run(Config(k=(3,)), store, rollouts=sampled.ref, rewards=paid.ref)
    for k in ((0,), (2, 2)):
        with pytest.raises(ValueError, match="at least 1 and stands once"):
            Config(k=k)


def test_rewards_of_other_rollouts(store, scored):
    first, _ = scored({"a": [1.0]})
    _, other = scored({"a": [1.0, 0.0]})
    with pytest.raises(LineageError, match="was made of held/rollouts@2, not of held/rollouts@1"):
        run(Config(), store, rollouts=first.ref, rewards=other.ref)


def test_a_missing_reward(store, scored):
    sampled, paid = scored({"a": [1.0, 0.0]})
    short = write(store, "rewards", paid.table().slice(1), {"rollouts": sampled})
    with pytest.raises(LineageError, match="1 rows for 2 rollouts; 1 rollouts are missing"):
        run(Config(), store, rollouts=sampled.ref, rewards=short.ref)


def asked(store, *groups):
    """Prompts of these groups."""
    columns = pa.StructArray.from_arrays([pa.array(groups)], ["name"])
    schema = fields.with_struct(prompts.SCHEMA, columns=columns.type)
    ids = pa.array([[1]] * len(groups), schema.field("prompt_ids").type)
    none = pa.nulls(len(groups), prompts.MESSAGES)
    return write(
        store,
        "prompts",
        pa.table([list(groups), none, ["?"] * len(groups), ids, columns], schema=schema),
    )


def test_beside_a_baseline_the_difference_is_paired_by_prompt(store, scored):
    """Groups stand in another order, "d" has a score on one side only; expected numbers are written
    out."""
    held_out = asked(store, "a", "b", "c", "d")
    before = scored(
        {"a": [1.0, 0.0], "b": [0.0, 0.0], "c": [1.0, 1.0], "d": [None, None]}, held_out
    )
    after = scored({"d": [1.0, 1.0], "c": [1.0, 1.0], "a": [1.0, 1.0], "b": [0.0, 1.0]}, held_out)
    config = Config(k=(1, 2))
    base = run(config, store, rollouts=before[0].ref, rewards=before[1].ref)
    ref = run(config, store, rollouts=after[0].ref, rewards=after[1].ref, baseline=base)
    manifest = store.open(ref).manifest
    assert manifest.input("baseline").ref == str(base)
    differences = [0.5, 0.5, 0.0]
    stderr = statistics.stdev(differences) / 3**0.5
    assert manifest.metrics["difference"]["score"] == pytest.approx(
        {"score": 1 / 3, "stderr": stderr, "n": 3}
    )
    at_two = [0.0, 1.0, 0.0]
    expected = {"score": 1 / 3, "stderr": statistics.stdev(at_two) / 3**0.5, "n": 3}
    assert manifest.metrics["difference"]["pass@k"]["2"] == pytest.approx(expected)
    assert manifest.metrics["unpaired"] == 1
    assert manifest.metrics["baseline"]["score"] == pytest.approx(1.5 / 3)
    alone = run(config, store, rollouts=after[0].ref, rewards=after[1].ref)
    assert alone != ref and "difference" not in store.open(alone).manifest.metrics


def test_prompts_that_the_baseline_alone_has_a_score_for_are_unpaired(store, scored):
    held_out = asked(store, "a", "b", "c")
    before = scored({"a": [1.0], "b": [0.0], "c": [1.0]}, held_out)
    after = scored({"a": [1.0], "b": [None], "c": [None]}, held_out)
    base = run(Config(), store, rollouts=before[0].ref, rewards=before[1].ref)
    ref = run(Config(), store, rollouts=after[0].ref, rewards=after[1].ref, baseline=base)
    metrics = store.open(ref).manifest.metrics
    assert (metrics["difference"]["score"]["n"], metrics["unpaired"]) == (1, 2)


def test_what_was_scored_otherwise_is_no_baseline(store, scored):
    """Another weight, or a person's overrides; how many workers scored is nobody's business."""
    sampled, paid = scored({"a": [1.0], "b": [0.0]}, asked(store, "a", "b"))

    def evaluated(baseline=None, stage="reward", weight=1.0, workers=1):
        config = reward.Config(functions=[{"use": "numeric", "weight": weight}], workers=workers)
        table = paid.table().combine_chunks()
        other = write(store, "rewards", table, {"rollouts": sampled}, stage, config)
        return run(
            Config(), store, rollouts=sampled.ref, rewards=other.ref, baseline=baseline, force=True
        )

    base = evaluated()
    assert (
        store.open(evaluated(base, workers=2)).manifest.metrics["difference"]["score"]["score"] == 0
    )
    for changed in ({"weight": 2.0}, {"stage": "override"}):
        with pytest.raises(
            LineageError, match="is no baseline: it was scored otherwise, by held/rewards@2"
        ):
            evaluated(base, **changed)


def test_what_was_measured_otherwise_is_no_baseline(store, scored):
    held_out, other = asked(store, "a", "b"), asked(store, "a", "c")
    mine, theirs, loose = (scored({"a": [1.0], "b": [0.0]}, of) for of in (held_out, other, None))
    versions = {"rollouts": mine[0].ref, "rewards": mine[1].ref}
    for rolled, paid in (theirs, loose):
        foreign = run(Config(), store, rollouts=rolled.ref, rewards=paid.ref)
        with pytest.raises(
            LineageError, match=r"is no baseline: its prompts are .*, expected held/prompts@1"
        ):
            run(Config(), store, **versions, baseline=foreign)
    with pytest.raises(LineageError, match="its prompts are unknown"):
        run(Config(), store, **versions, baseline=held_out.ref)
    strict = run(Config(threshold=0.5), store, **versions)
    with pytest.raises(LineageError, match=r"is no baseline: it measured .*0.5.*expected .*1.0"):
        run(Config(), store, **versions, baseline=strict)
    nothing = (
        scored({"a": [None], "b": [1.0]}, held_out),
        scored({"a": [1.0], "b": [None]}, held_out),
    )
    first = run(Config(), store, rollouts=nothing[0][0].ref, rewards=nothing[0][1].ref)
    with pytest.raises(NumericError, match="no prompt has a score here and in"):
        run(Config(), store, rollouts=nothing[1][0].ref, rewards=nothing[1][1].ref, baseline=first)


def test_an_episode_that_was_not_scored_is_in_no_share_of_successes(store, policy):
    rows = [episodes.row(f"a-{n}", [episodes.turn(1)] * n) for n in (1, 2, 3)]
    sampled = episodes.write(store, policy, rows, "held")
    earned = {"a-1": [1.0], "a-2": [0.0, 0.0], "a-3": None}
    paid = episodes.write_rewards(store, sampled, lambda row: earned[row["rollout_id"]], "held")
    ref = run(Config(), store, rollouts=sampled.ref, rewards=paid.ref)
    steps = store.open(ref).manifest.metrics["steps_to_success"]
    assert (steps["n"], steps["within"]) == (1, {"1": 0.5})


def cut_metrics(store, scored, unscored, **options):
    """Of two prompts: answers that were cut off, one that failed, and one with no score."""
    groups = {"a": [1.0, None, None], "b": [None, 0.5, -2.0], "c": [None, None, None]}
    cut = ("a-1", "b-0", "b-2", "c-0", "c-1")
    versions = scored(groups, cut=cut, failed=("c-1",))
    refs = {"rollouts": versions[0].ref, "rewards": versions[1].ref}
    ref = run(Config(unscored=unscored, **options), store, **refs)
    return store.open(ref)


@pytest.mark.parametrize(
    ("unscored", "means", "expected"),
    [
        ("zero", [0.5, -0.5, 0.0], {"null": 3, "limited": 3, "limited_score": 0.0}),
        ("worst", [-0.5, -3.5 / 3, -2.0], {"null": 3, "limited": 3, "limited_score": -2.0}),
        ("leave_out", [1.0, -0.75], {"null": 6, "limited": 0}),
    ],
)
def test_an_answer_that_a_limit_cut_off_counts_by_the_rule(
    store, scored, unscored, means, expected
):
    """a-2 stopped by itself, and c-1 failed: both are left out in any case. c-2 too."""
    version = cut_metrics(store, scored, unscored)
    metrics = version.manifest.metrics
    assert metrics["score"] == pytest.approx(statistics.fmean(means))
    assert metrics["stderr"] == pytest.approx(statistics.stdev(means) / len(means) ** 0.5)
    assert metrics["n"] == len(means)
    assert {
        name: metrics[name] for name in metrics if name in ("null", "limited", "limited_score")
    } == expected
    assert version.manifest.status == {"scored": 3, "not_scored": 6}
    scores = version.table().column("score").to_pylist()
    counted = expected.get("limited_score")
    assert scores == [1.0, counted, None, counted, 0.5, -2.0, counted, None, None]


def test_the_rule_is_zero_by_default(store, scored):
    assert Config() == Config(unscored="zero")
    assert cut_metrics(store, scored, "zero").ref == run(
        Config(), store, rollouts="held/rollouts@1", rewards="held/rewards@1"
    )
    for threshold in (0.0, -0.5):
        with pytest.raises(ValueError, match='unscored = "worst" or "leave_out"'):
            Config(threshold=threshold)
        assert Config(threshold=threshold, unscored="worst").threshold == threshold


def test_where_every_answer_is_cut_off_the_score_is_that_of_the_rule(store, scored):
    versions = scored({"a": [None], "b": [None]}, cut=("a-0", "b-0"))
    refs = {"rollouts": versions[0].ref, "rewards": versions[1].ref}
    for unscored in ("zero", "worst"):
        metrics = store.open(run(Config(unscored=unscored), store, **refs)).manifest.metrics
        assert (metrics["score"], metrics["n"], metrics["pass@k"]["1"]["score"]) == (0.0, 2, 0.0)
    with pytest.raises(NumericError, match="none of 2 rollouts has a score"):
        run(Config(unscored="leave_out"), store, **refs)


def test_the_worst_score_is_at_most_zero(store, scored):
    versions = scored({"a": [1.0, None], "b": [0.5]}, cut=("a-1",))
    refs = {"rollouts": versions[0].ref, "rewards": versions[1].ref}
    version = store.open(run(Config(unscored="worst"), store, **refs))
    assert version.table()["score"].to_pylist() == [1.0, 0.0, 0.5]


def test_an_error_of_another_scorer_leaves_no_cut_answer_out(store, scored):
    """Only of the part that is evaluated; the reward is of both."""
    sampled, paid = scored({"a": [None, 1.0]}, cut=("a-0",))
    rows = paid.table().to_pylist()
    for row in rows:
        row["parts"]["style"] = None
        row["errors"]["style"] = "ValueError"
    table = pa.Table.from_pylist(rows, schema=rewards.schema_for(["right", "style"]))
    refs = {"rollouts": sampled.ref}
    refs["rewards"] = write(store, "rewards", table, {"rollouts": sampled}).ref
    for score, limited in (("right", 1), ("reward", 0)):
        metrics = store.open(run(Config(score=score), store, **refs)).manifest.metrics
        assert (metrics["limited"], metrics["null"]) == (limited, 1 - limited)


def test_a_policy_that_is_cut_off_more_often_is_not_better(store, scored):
    """All pairs count, so n is the number of prompts; the worst score is never better than that of
    the baseline."""
    held_out = asked(store, "a", "b", "c", "d")
    before = scored({"a": [0.0], "b": [1.0], "c": [-3.0], "d": [1.0]}, held_out)
    after = scored(
        {"a": [None], "b": [1.0], "c": [None], "d": [None]}, held_out, cut=("a-0", "c-0", "d-0")
    )
    expected = {"zero": [0, 0, 3, -1], "worst": [-3, 0, 0, -4], "leave_out": [0]}
    for unscored, differences in expected.items():
        config = Config(unscored=unscored)
        base = run(config, store, rollouts=before[0].ref, rewards=before[1].ref)
        refs = {"rollouts": after[0].ref, "rewards": after[1].ref, "baseline": base}
        metrics = store.open(run(config, store, **refs)).manifest.metrics
        difference = metrics["difference"]["score"]
        assert difference["score"] == pytest.approx(statistics.fmean(differences))
        assert difference["n"] == len(differences) and metrics["unpaired"] == 4 - len(differences)
        if len(differences) > 1:
            assert difference["stderr"] == pytest.approx(statistics.stdev(differences) / 2)
        assert (metrics["baseline"]["null"], metrics["baseline"]["limited"]) == (0, 0)


def test_episodes_that_any_limit_ended_count_and_failed_ones_do_not(store, policy):
    reasons = {
        "max_turns": 0.0, "max_tokens": 0.0, "context": 0.0, "max_tool_calls": 0.0,
        "max_images": 0.0, "answered": None, "environment": None, "parse_error": None,
        "timeout": None, "environment_error": None,
    }  # fmt: skip
    rows = [
        episodes.row(f"{reason}-0", [episodes.turn(1)], end_reason=reason) for reason in reasons
    ]
    rows.append(episodes.row("paid-0", [episodes.turn(1)], end_reason="max_turns"))
    sampled = episodes.write(store, policy, rows, "held")
    paid = episodes.write_rewards(
        store, sampled, lambda row: [0.5] if row["group_id"] == "paid" else None, "held"
    )
    version = store.open(run(Config(), store, rollouts=sampled.ref, rewards=paid.ref))
    assert version.table()["score"].to_pylist() == [*reasons.values(), 0.5]
    assert version.manifest.metrics["n"] == 6
