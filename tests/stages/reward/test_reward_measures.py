"""What the manifest and `diff` say of rewards, against numbers by hand, the standard library and a
search over all pairs."""

import statistics

import numpy as np
import pyarrow as pa
import pytest

from quiver.schemas import rewards
from quiver.stages.reward.measures import changes, correlation, failures, means, summary

NONE = float("nan")


def table(groups: str, **columns: list) -> pa.Table:
    """Rewards of scorers whose values are numbers, None, or the text of an error."""
    failed = [
        {n: v if isinstance(v, str) else None for n, v in zip(columns, row, strict=True)}
        for row in zip(*columns.values(), strict=True)
    ]
    rows = [
        {
            "rollout_id": f"r{row}",
            "group_id": groups[row],
            "reward": None if any(errors.values()) else sum(value or 0 for value in values),
            "parts": {
                name: None if errors[name] else value
                for name, value in zip(columns, values, strict=True)
            },
            "errors": errors,
        }
        for row, (values, errors) in enumerate(
            zip(zip(*columns.values(), strict=True), failed, strict=True)
        )
    ]
    return pa.Table.from_pylist(rows, rewards.schema_for(list(columns)))


def test_correlation_is_pearsons_over_rows_that_have_both():
    a, b = np.array([1.0, 2, 3, NONE, 5]), np.array([2.0, 1, 4, 9, NONE])
    assert correlation(a, b) == pytest.approx(statistics.correlation([1, 2, 3], [2, 1, 4]))
    assert correlation(a, -a) == pytest.approx(-1)
    for undefined in ([1.0] * 5, [NONE] * 5, [1.0, NONE, NONE, NONE, NONE]):
        assert correlation(a, np.array(undefined)) is None


def test_functions_are_described():
    x = [1, 2, 3, "TimeoutError: no answer"]
    rewards = table("aabb", x=x, y=[2, "ValueError: a", "ValueError: b", 0])
    metrics, status = summary(rewards, {"x": 1.23456, "y": 0.0})
    assert status == {"scored": 1, "not_scored": 0, "failed": 3}
    assert (metrics["reward_null"], metrics["reward_null_rate"]) == (3, 0.75)
    x, y = metrics["functions"]["x"], metrics["functions"]["y"]
    assert x == {
        "mean": 2.0, "std": 1.0, "min": 1.0, "max": 3.0, "null": 0, "null_rate": 0,
        "errors": 1, "error_kinds": {"TimeoutError": 1}, "seconds": 1.235,
    }  # fmt: skip
    assert (y["mean"], y["null"], y["errors"], y["error_kinds"]) == (1, 0, 2, {"ValueError": 2})
    assert metrics["correlation"] == {"x y": None}
    assert list(failures(rewards)) == [
        ("y", "r1", "ValueError: a"),
        ("y", "r2", "ValueError: b"),
        ("x", "r3", "TimeoutError: no answer"),
    ]


def test_a_table_without_numbers_is_described():
    nothing = dict.fromkeys(("mean", "std", "min", "max"))
    metrics, status = summary(table("", x=[], y=[]), {"x": 0.0, "y": 0.0})
    assert status == {"scored": 0, "not_scored": 0, "failed": 0}
    assert metrics["functions"]["x"].items() >= {**nothing, "null_rate": None}.items()
    assert metrics["reward_mean"] is None and metrics["groups"]["zero_variance"] is None
    metrics, _ = summary(table("aabb", x=[None] * 4), {})
    assert metrics["functions"]["x"].items() >= {**nothing, "null": 4, "null_rate": 1.0}.items()


def test_means_of_numbers_beside_rewards():
    texts = ['{"n": 1, "ok": true, "why": "x"}', '{"n": 4, "ok": false, "none": null}', None, "[5]"]
    assert means(pa.chunked_array([texts])) == {"n": 2.5, "ok": 0.5}
    huge = "1" + "0" * 400
    texts = [f'{{"n": {huge}, "m": {huge}, "sum": 1.7e308}}', '{"n": 3, "sum": 1.7e308}']
    assert means(pa.chunked_array([texts])) == {"n": 3.0, "sum": 1.7e308}


def test_groups_that_teach_nothing_are_counted():
    """Two of equal rewards, one that varies, one with a row that failed, one alone."""
    rewards = table("aabbccdde", x=[7, 7, 7, 8, 0, 0, 9, "ValueError: a", 1])
    assert summary(rewards, {})[0]["groups"] == {
        "count": 5, "too_small": 2, "incomplete": 1, "zero_variance": pytest.approx(2 / 3),
    }  # fmt: skip


def test_changes_by_hand():
    """Group a: the second overtakes the first; b: a tie is broken, which is no flip; c: one loses
    its reward, one gets one. To or from 0 no sign is opposite."""
    a = np.array([1.0, 0.0, 2.0, 5.0, 5.0, -1.0, NONE, 0.5])
    b = np.array([0.0, 1.0, 2.0, 5.0, 6.0, NONE, 3.0, -0.5])
    found = changes(list("aaabbccc"), a, b)
    assert found == {
        "null_to_value": 1,
        "value_to_null": 1,
        "order": 2,
        "sign": 1,
        "mean_difference": pytest.approx((-1 + 1 + 0 + 0 + 1 - 1) / 6),
        "correlation": pytest.approx(
            statistics.correlation([1, 0, 2, 5, 5, 0.5], [0, 1, 2, 5, 6, -0.5])
        ),
    }


def test_order_is_that_of_all_pairs():
    random = np.random.default_rng(0)
    for size in (1, 2, 7, 40):
        a, b = random.integers(0, 6, size).astype(float), random.integers(0, 6, size).astype(float)
        flipped = ((a[:, None] - a) * (b[:, None] - b) < 0).any(1).sum()
        assert changes(["g"] * size, a, b)["order"] == flipped


def test_nothing_in_common():
    found = changes(["a", "a"], np.array([1.0, NONE]), np.array([NONE, NONE]))
    assert (found["value_to_null"], found["order"], found["mean_difference"]) == (1, 0, None)
    assert found["correlation"] is None
