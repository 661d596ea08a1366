"""Tables in and out of scoring: rollouts joined with their prompts, parts weighted into rewards, and what the manifest says.

A reward is made in this order, each part kept as its own column: raw parts, weights, clip, overlong penalty.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas import rewards
from schemas.errors import LineageError, NumericError, printable

from .scoring import LARGEST, Part

OVERLONG = "overlong"
"""The penalty's column in `parts`."""


def join(rollouts: pa.Table, prompts: pa.Table) -> pa.Array:
    """For each rollout the row of its prompt. LineageError for a group that the prompts do not hold."""
    groups = pa.array(rollouts.column("group_id").to_pylist(), pa.string())
    order = pc.index_in(groups, value_set=prompts.column("group_id").combine_chunks())
    if order.null_count:
        unknown = groups.filter(pc.is_null(order))[0].as_py()
        raise LineageError(f"group {printable(unknown)}", "has rollouts but no prompt", next="quiver lineage of the rollouts")
    return order


def as_batch(rollouts: pa.Table, prompts: pa.Table) -> dict[str, list[Any]]:
    """What functions are offered, by name; `prompts` row by row those of `rollouts`. A user's column never hides these four."""
    columns = pa.chunked_array(prompts.column("columns").chunks, prompts.schema.field("columns").type)
    asked = zip(prompts.column("messages").to_pylist(), prompts.column("prompt_text").to_pylist(), strict=True)
    return {
        **{field.name: pc.struct_field(columns, [at]).to_pylist() for at, field in enumerate(columns.type)},
        "prompts": [text if messages is None else messages for messages, text in asked],
        "completions": rollouts.column("completion_text").to_pylist(),
        "completion_ids": rollouts.column("completion_ids").to_pylist(),
        "finish_reason": rollouts.column("finish_reason").to_pylist(),
    }


def overlong(length: int, max_tokens: int, cache: int) -> float:
    """The soft penalty of a completion of `length` tokens, end token included, in [−1, 0].

        penalty = −clip((length − (max_tokens − cache)) / cache, 0, 1)

    It tells the policy that it runs out of room before it does, where cutting alone says it in a jump; `cache` = 1 is that jump.
    As in the paper, whose L_max and L_cache these are.

    Reference: DAPO, https://arxiv.org/abs/2503.14476, equation 13.

    >>> [overlong(length, max_tokens=20, cache=8) for length in (12, 14, 20, 25)]
    [0.0, -0.25, -1.0, -1.0]
    """
    return 0.0 - min(max((length - (max_tokens - cache)) / cache, 0.0), 1.0)


def as_rewards(
    rollouts: pa.Table,
    parts: dict[str, list[Part]],
    weights: dict[str, float],
    clip: tuple[float, float] | None,
    penalty: dict[str, Any] | None = None,
) -> pa.Table:
    """rewards/1 for `rollouts`, with one list of parts a function, in order of rows.

    `penalty`: max_tokens, cache and weight of the overlong penalty, which then is the last part.
    """
    rows = [{name: parts[name][row] for name in weights} for row in range(rollouts.num_rows)]
    sums = [weigh(row, weights, clip) for row in rows]
    if penalty is not None:
        lengths = pc.list_value_length(rollouts.column("completion_ids")).to_pylist()
        shaped = [overlong(length, penalty["max_tokens"], penalty["cache"]) for length in lengths]
        rows = [{**row, OVERLONG: Part(value)} for row, value in zip(rows, shaped, strict=True)]
        sums = [None if r is None else _storable(r + penalty["weight"] * v) for r, v in zip(sums, shaped, strict=True)]
    schema = rewards.schema_for([*weights, *([OVERLONG] if penalty else [])])
    columns = [
        sums,
        [{name: part.value for name, part in row.items()} for row in rows],
        [{name: part.error for name, part in row.items()} for row in rows],
    ]
    made = [pa.array(column, schema.field(at + 2).type) for at, column in enumerate(columns)]
    return pa.table([rollouts.column("rollout_id"), rollouts.column("group_id"), *made], schema=schema)


def weigh(parts: dict[str, Part], weights: dict[str, float], clip: tuple[float, float] | None) -> float | None:
    """The reward of one row, R = clip(Σ_f weight_f · part_f) over the functions that gave a value.

    None where a function failed, or where none gave a value.

    >>> weigh({"a": Part(1.0), "b": Part(0.5), "c": Part()}, {"a": 1.0, "b": 2.0, "c": 9.0}, (0.0, 1.5))
    1.5
    >>> weigh({"a": Part(1.0), "b": Part(error="ValueError")}, {"a": 1.0, "b": 1.0}, None) is None
    True
    """
    given = [weights[name] * part.value for name, part in parts.items() if part.value is not None]
    if not given or any(part.error is not None for part in parts.values()):
        return None
    total = math.fsum(given)
    return _storable(total if clip is None else min(max(total, clip[0]), clip[1]))


def _storable(total: float) -> float:
    if abs(total) > LARGEST:
        raise NumericError(
            "reward", f"the weighted sum {total:g} is not finite as float32", next="lower the weights, or set reward_clip"
        )
    return total


def _error_columns(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    column = table.column("errors")
    return {field.name: pc.struct_field(column, [at]) for at, field in enumerate(column.type)}


def _failed(table: pa.Table) -> np.ndarray:
    """[rows] bool: at least one function failed there."""
    failed = np.zeros(table.num_rows, bool)
    for column in _error_columns(table).values():
        failed |= column.is_valid().to_numpy()
    return failed


def count_failed(table: pa.Table) -> int:
    """Rows in which at least one function failed."""
    return int(_failed(table).sum())


def first_error(table: pa.Table) -> tuple[str, int, str]:
    """Function, row and text of the first error in a table that has one."""
    row = int(np.flatnonzero(_failed(table))[0])
    name, error = next((name, text) for name, text in table.column("errors")[row].as_py().items() if text is not None)
    return name, row, error


# -- what the manifest says -------------------------------------------------------------------------------------------------


def summary(table: pa.Table, seconds: dict[str, float]) -> tuple[dict[str, Any], dict[str, int]]:
    """Metrics and row counts by status of a whole rewards table."""
    values = table.column("reward").to_numpy(zero_copy_only=False)
    scored, failed = ~np.isnan(values), count_failed(table)
    errors = _error_columns(table)
    functions = {}
    for at, field in enumerate(table.schema.field("parts").type):
        part = pc.struct_field(table.column("parts"), [at])
        numbers = part.drop_null().to_numpy()
        wrong = len(table) - errors[field.name].null_count
        counts = {"null": part.null_count - wrong, "errors": wrong, "seconds": round(seconds[field.name], 3)}
        functions[field.name] = {**describe(numbers), **counts}
    metrics = {f"reward_{name}": value for name, value in describe(values[scored]).items()}
    metrics |= {"functions": functions, "groups": groups(table.column("group_id").to_pylist(), values)}
    count = int(scored.sum())
    return metrics, {"scored": count, "not_scored": len(table) - count - failed, "failed": failed}


def describe(numbers: np.ndarray) -> dict[str, float | None]:
    """Mean, unbiased standard deviation, least and largest of [n] numbers, in float64; None where n is too small for it."""
    numbers = numbers.astype(np.float64)
    return {
        "mean": float(numbers.mean()) if len(numbers) else None,
        "std": float(numbers.std(ddof=1)) if len(numbers) > 1 else None,
        "min": float(numbers.min()) if len(numbers) else None,
        "max": float(numbers.max()) if len(numbers) else None,
    }


def groups(group_ids: list[str], rewards: np.ndarray) -> dict[str, Any]:
    """How many groups there are, and how many can teach nothing: fewer than two scored rollouts, or equal rewards.

    `zero_variance` is the share among groups with at least two scored rollouts; None where there is no such group.
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
        "incomplete": sum(len(group) < len(whole) for group, whole in zip(scored, found.values(), strict=True)),
        "zero_variance": equal / len(able) if able else None,
    }
