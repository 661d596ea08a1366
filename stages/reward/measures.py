"""Compute the manifest's metrics of a rewards table, and the changes between two versions of the
same rollouts."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas.rewards import names_of


def failures(table: pa.Table) -> Iterator[tuple[str, str, str]]:
    """Yield scorer, rollout_id and error of each failure in a rewards table, row by row."""
    for row in table.select(["rollout_id", "errors"]).to_pylist():
        for name, error in row["errors"].items():
            if error is not None:
                yield name, row["rollout_id"], error


# -- one version


def summary(table: pa.Table, seconds: dict[str, float]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return metrics and row counts by status of a whole rewards table. `seconds`: time in each
    part's scorer, if it took any."""
    num_rows = len(table)
    rewards = table["reward"].to_numpy()
    is_scored = ~np.isnan(rewards)
    has_failed = np.zeros(num_rows, bool)
    functions = {}
    numbers = {}
    columns = zip(table["parts"].flatten(), table["errors"].flatten(), strict=True)
    for name, (part, errors) in zip(names_of(table), columns, strict=True):
        has_failed |= errors.is_valid().to_numpy()
        messages = errors.drop_null().to_pylist()
        kinds = Counter(re.match(r"\w*", message)[0] for message in messages)
        numbers[name] = part.to_numpy()
        functions[name] = {
            **describe(numbers[name], part.null_count - len(messages)),
            "errors": len(messages),
            "error_kinds": dict(kinds.most_common(10)),
            "seconds": round(seconds.get(name, 0.0), 3),
        }
    num_scored = int(is_scored.sum())
    num_failed = int((~is_scored & has_failed).sum())
    null = num_rows - num_scored
    metrics = {f"reward_{name}": number for name, number in describe(rewards, null).items()}
    metrics |= {
        "functions": functions,
        "correlation": {
            f"{a} {b}": correlation(numbers[a], numbers[b]) for a, b in combinations(numbers, 2)
        },
        "groups": groups(table),
    }
    if "extra" in table.column_names:
        columns = zip(names_of(table, "extra"), table["extra"].flatten(), strict=True)
        metrics["extra"] = {name: means(texts) for name, texts in columns}
    status = {"scored": num_scored, "not_scored": null - num_failed, "failed": num_failed}
    return metrics, status


def means(texts: pa.ChunkedArray) -> dict[str, float]:
    """Return the mean of every number in the rows' JSON texts, by name, over the rows that have it;
    true is 1, and false 0. Integers that no float holds are left out."""
    by_name: dict[str, list[float]] = {}
    for text in texts.drop_null().to_pylist():
        members = json.loads(text)
        for name, member in members.items() if isinstance(members, dict) else ():
            if isinstance(member, int | float):
                with suppress(OverflowError):
                    by_name.setdefault(name, []).append(float(member))
    columns = {name: numbers for name, numbers in by_name.items() if numbers}
    # divided first: the sum of two large numbers may be infinite
    return {
        name: math.fsum(number / len(numbers) for number in numbers)
        for name, numbers in columns.items()
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Return Pearson's correlation of two [rows] columns over the rows without NaN in either; None
    if one of them does not vary."""
    in_both = ~(np.isnan(a) | np.isnan(b))
    x = a[in_both].astype(np.float64)
    y = b[in_both].astype(np.float64)
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return None
    return float(np.corrcoef(x, y)[0, 1])


def describe(column: np.ndarray, null: int) -> dict[str, float | None]:
    """Return mean, unbiased standard deviation, minimum and maximum of a [rows] column in float64,
    without NaN. A statistic is None if there are too few numbers.

    Args:
        null: Number of rows that are not scored; returned together with its rate.
    """
    numbers = column[~np.isnan(column)].astype(np.float64)
    statistics = dict.fromkeys(("mean", "std", "min", "max"))
    if len(numbers):
        statistics = {
            "mean": float(numbers.mean()),
            "std": float(numbers.std(ddof=1)) if len(numbers) > 1 else None,
            "min": float(numbers.min()),
            "max": float(numbers.max()),
        }
    return {**statistics, "null": null, "null_rate": null / len(column) if len(column) else None}


def groups(table: pa.Table) -> dict[str, Any]:
    """Count the groups, and the groups that cannot teach anything: fewer than two scored rollouts,
    or equal rewards.

    `zero_variance` is the share among groups with at least two scored rollouts; None if there is no
    such group.
    """
    scores = [("reward", "count"), ("reward", "min"), ("reward", "max"), ("rollout_id", "count")]
    columns = table.group_by("group_id").aggregate(scores)
    scored, lowest, highest, size = (
        columns[f"{name}_{function}"].to_numpy() for name, function in scores
    )
    is_able = scored >= 2
    num_able = int(is_able.sum())
    num_equal = int((is_able & (lowest == highest)).sum())
    return {
        "count": len(columns),
        "too_small": len(columns) - num_able,
        "incomplete": int((scored < size).sum()),
        "zero_variance": num_equal / num_able if num_able else None,
    }


# -- two versions


def changes(group_ids: list[str], a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """Compare [rows] rewards `a` with `b`; NaN stands for no reward.

    Returns:
        order: Rows that changed places with another row of their group (one was above the other and
            is now below it).
        sign: Rows that changed between negative and positive. 0 has no sign.
        mean_difference, correlation: b − a on average, and Pearson's correlation.
        null_to_value, value_to_null: Rows that gained or lost their reward.

    All but the last two count only rows that have a reward in both.
    """
    in_a = ~np.isnan(a)
    in_b = ~np.isnan(b)
    x = a[in_a & in_b].astype(np.float64)
    y = b[in_a & in_b].astype(np.float64)
    members: dict[str, list[int]] = {}
    for row, group in enumerate(np.asarray(group_ids, object)[in_a & in_b]):
        members.setdefault(group, []).append(row)
    return {
        "null_to_value": int((~in_a & in_b).sum()),
        "value_to_null": int((in_a & ~in_b).sum()),
        "order": sum(int(_overtaken(x[rows], y[rows]).sum()) for rows in members.values()),
        "sign": int((np.sign(x) * np.sign(y) < 0).sum()),
        "mean_difference": float((y - x).mean()) if len(x) else None,
        "correlation": correlation(x, y),
    }


def _overtaken(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return [n] bool: true if another row is below in x and above in y, or the reverse."""
    before = np.sign(x[:, None] - x)
    after = np.sign(y[:, None] - y)
    return (before * after < 0).any(1)
