"""What the manifest says of a rewards table, and what changed between two versions of the same
rollouts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.rewards import names_of


def failures(table: pa.Table) -> Iterator[tuple[str, str, str]]:
    """Function, rollout_id and error of everything that failed in a rewards table, row by row."""
    wrong = table.filter(pc.invert(_fine(table)))
    for rollout, errors in zip(
        wrong.column("rollout_id").to_pylist(), wrong.column("errors").to_pylist(), strict=True
    ):
        yield from ((name, rollout, text) for name, text in errors.items() if text is not None)


def _fine(table: pa.Table) -> pa.ChunkedArray:
    """[rows] bool: no function failed there."""
    fine = pa.chunked_array([pa.array(np.ones(table.num_rows, bool))])
    for name in names_of(table):
        fine = pc.and_(fine, _field(table, "errors", name).is_null())
    return fine


def _field(table: pa.Table, column: str, name: str) -> pa.ChunkedArray:
    return pc.struct_field(table.column(column), [names_of(table, column).index(name)])


# -- one version


def summary(table: pa.Table, seconds: dict[str, float]) -> tuple[dict[str, Any], dict[str, int]]:
    """Metrics and row counts by status of a whole rewards table."""
    values = table.column("reward").to_numpy(zero_copy_only=False)
    scored = ~np.isnan(values)
    parts = {name: _field(table, "parts", name) for name in names_of(table)}
    functions = {
        name: _of_function(table, name, part, seconds[name]) for name, part in parts.items()
    }
    numbers = {name: part.to_numpy(zero_copy_only=False) for name, part in parts.items()}
    metrics = {f"reward_{name}": value for name, value in describe(values[scored]).items()}
    missing = len(table) - int(scored.sum())
    metrics |= {
        "reward_null": missing,
        "reward_null_rate": missing / len(table) if len(table) else None,
        "functions": functions,
        "correlation": {
            f"{a} {b}": correlation(numbers[a], numbers[b]) for a, b in combinations(numbers, 2)
        },
        "groups": groups(table.column("group_id").to_pylist(), values),
    }
    count, failed = int(scored.sum()), int((~scored & ~_fine(table).to_numpy()).sum())
    return metrics, {"scored": count, "not_scored": len(table) - count - failed, "failed": failed}


def _of_function(
    table: pa.Table, name: str, part: pa.ChunkedArray, seconds: float
) -> dict[str, Any]:
    errors = _field(table, "errors", name).drop_null().to_pylist()
    null = part.null_count - len(errors)
    return {
        **describe(part.drop_null().to_numpy()),
        "null": null,
        "null_rate": null / len(table) if len(table) else None,
        "errors": len(errors),
        "error_kinds": dict(Counter(re.match(r"\w*", text)[0] for text in errors).most_common(10)),
        "seconds": round(seconds, 3),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's correlation of two [rows] columns over the rows where neither is NaN; None where
    one of them does not vary."""
    both = ~(np.isnan(a) | np.isnan(b))
    x, y = a[both].astype(np.float64), b[both].astype(np.float64)
    if len(x) < 2 or x.min() == x.max() or y.min() == y.max():
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def describe(numbers: np.ndarray) -> dict[str, float | None]:
    """Mean, unbiased standard deviation, least and largest of [n] numbers, in float64; None where n
    is too small for it."""
    numbers = numbers.astype(np.float64)
    return {
        "mean": float(numbers.mean()) if len(numbers) else None,
        "std": float(numbers.std(ddof=1)) if len(numbers) > 1 else None,
        "min": float(numbers.min()) if len(numbers) else None,
        "max": float(numbers.max()) if len(numbers) else None,
    }


def groups(group_ids: list[str], rewards: np.ndarray) -> dict[str, Any]:
    """How many groups there are, and how many can teach nothing: fewer than two scored rollouts, or
    equal rewards.

    `zero_variance` is the share among groups with at least two scored rollouts; None where there is
    no such group.
    """
    found: dict[str, list[float]] = {}
    for group, reward in zip(group_ids, rewards.tolist(), strict=True):
        found.setdefault(group, []).append(reward)
    scored = [[reward for reward in group if not math.isnan(reward)] for group in found.values()]
    able = [group for group in scored if len(group) >= 2]
    equal = sum(min(group) == max(group) for group in able)
    return {
        "count": len(found),
        "too_small": len(found) - len(able),
        "incomplete": sum(
            len(group) < len(whole) for group, whole in zip(scored, found.values(), strict=True)
        ),
        "zero_variance": equal / len(able) if able else None,
    }


# -- two versions


def changes(group_ids: list[str], a: np.ndarray, b: np.ndarray) -> dict[str, Any]:
    """What became of [rows] rewards `a` in `b`, NaN where there is none.

    `order`: rows that changed places with another of their group (one was above the other and is
    below it now); `sign`: rows that went from one of negative, zero, positive to another; both
    among the rows that have a reward in both, like `mean_difference` (b − a) and `correlation`.
    """
    both, no_a, no_b = ~(np.isnan(a) | np.isnan(b)), np.isnan(a), np.isnan(b)
    x, y = a[both].astype(np.float64), b[both].astype(np.float64)
    members: dict[str, list[int]] = {}
    for row, group in enumerate(np.asarray(group_ids, object)[both]):
        members.setdefault(group, []).append(row)
    return {
        "null_to_value": int((no_a & ~no_b).sum()),
        "value_to_null": int((~no_a & no_b).sum()),
        "order": sum(int(_overtaken(x[rows], y[rows]).sum()) for rows in members.values()),
        "sign": int((np.sign(x) != np.sign(y)).sum()),
        "mean_difference": float((y - x).mean()) if len(x) else None,
        "correlation": correlation(x, y),
    }


def _overtaken(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[n] bool: some other row is below in x and above in y, or the reverse."""
    levels, at = np.unique(x, return_inverse=True)
    highest, lowest = np.full(len(levels), -np.inf), np.full(len(levels), np.inf)
    np.maximum.at(highest, at, y)
    np.minimum.at(lowest, at, y)
    below = np.concatenate([[-np.inf], np.maximum.accumulate(highest)[:-1]])
    above = np.concatenate([np.minimum.accumulate(lowest[::-1])[::-1][1:], [np.inf]])
    return (below[at] > y) | (above[at] < y)
