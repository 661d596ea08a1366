"""Tables in and out of scoring: rollouts joined with their prompts, parts weighted into rewards.

A reward is made in this order, each part kept as its own column: raw parts, weights, clip, overlong
penalty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import rewards
from quiver.schemas.errors import LineageError, NumericError, printable

from .functions import overlong_penalty
from .scoring import LARGEST, OFFERED, Part

OVERLONG = "overlong"
"""The penalty's column in `parts`."""


def join(rollouts: pa.Table, prompts: pa.Table) -> pa.Array:
    """For each rollout the row of its prompt. LineageError for a group that the prompts do not
    hold."""
    groups = pa.array(rollouts.column("group_id").to_pylist(), pa.string())
    order = pc.index_in(groups, value_set=prompts.column("group_id").combine_chunks())
    if order.null_count:
        unknown = groups.filter(pc.is_null(order))[0].as_py()
        raise LineageError(
            f"group {printable(unknown)}",
            "has rollouts but no prompt",
            next="generate rollouts of these prompts",
        )
    return order


class Offered(Mapping[str, list[Any]]):
    """What scorers are offered, by name; a list is made when it is first asked for. A user's column
    never hides one of ours."""

    def __init__(self, rollouts: pa.Table, prompts: pa.Table) -> None:
        """`prompts`: row by row those of `rollouts`."""
        self._rollouts, self._prompts, self._made = rollouts, prompts, {}
        self._columns = [field.name for field in prompts.schema.field("columns").type]

    def __getitem__(self, name: str) -> list[Any]:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        yield from OFFERED
        yield from (name for name in self._columns if name not in OFFERED)

    def __len__(self) -> int:
        return len({*OFFERED, *self._columns})

    def _make(self, name: str) -> list[Any]:
        if name == "prompts":
            asked = zip(
                *(self._prompts.column(each).to_pylist() for each in ("messages", "prompt_text")),
                strict=True,
            )
            return [text if messages is None else messages for messages, text in asked]
        if name in _COLUMN_OF:
            return self._rollouts.column(_COLUMN_OF[name]).to_pylist()
        if name not in self._columns:
            raise KeyError(name)
        return pc.struct_field(
            self._prompts.column("columns"), [self._columns.index(name)]
        ).to_pylist()


_COLUMN_OF = {
    "completions": "completion_text",
    "completion_ids": "completion_ids",
    "finish_reason": "finish_reason",
    "rollout_ids": "rollout_id",
}


def as_rewards(
    rollouts: pa.Table,
    parts: dict[str, list[Part]],
    weights: dict[str, float],
    clip: tuple[float, float] | None,
    penalty: dict[str, Any] | None = None,
    extras: list[str] | tuple[str, ...] = (),
) -> pa.Table:
    """rewards/1 for `rollouts`, with one list of parts a function, in order of rows.

    `penalty`: max_tokens, cache and weight of the overlong penalty, which then is the last part.
    `extras`: functions whose extra is kept.
    """
    sums = [
        weigh({name: parts[name][row] for name in weights}, weights, clip)
        for row in range(rollouts.num_rows)
    ]
    parts = {name: parts[name] for name in weights}
    if penalty is not None:
        lengths = pc.list_value_length(rollouts.column("completion_ids")).to_pylist()
        shaped = [
            overlong_penalty(length, penalty["max_tokens"], penalty["cache"]) for length in lengths
        ]
        parts[OVERLONG] = [Part(value) for value in shaped]
        sums = [
            None if r is None else storable(r + penalty["weight"] * v)
            for r, v in zip(sums, shaped, strict=True)
        ]
    schema = rewards.schema_for(list(parts), extras)

    def struct(column: str, names: list[str] | tuple[str, ...], at: int) -> pa.StructArray:
        kind = schema.field(column).type
        arrays = [
            pa.array([part[at] for part in parts[name]], kind.field(name).type) for name in names
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(kind))

    columns = [
        pa.array(sums, pa.float32()),
        struct("parts", list(parts), 0),
        struct("errors", list(parts), 1),
    ]
    columns += [struct("extra", extras, 2)] if extras else []
    return pa.table(
        [rollouts.column("rollout_id"), rollouts.column("group_id"), *columns], schema=schema
    )


def weigh(
    parts: dict[str, Part], weights: dict[str, float], clip: tuple[float, float] | None
) -> float | None:
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
    return storable(total if clip is None else min(max(total, clip[0]), clip[1]))


def storable(total: float) -> float:
    """`total` where a float32 can hold it. NumericError."""
    if abs(total) > LARGEST:
        raise NumericError(
            "reward",
            f"the weighted sum {total:g} is not finite as float32",
            next="lower the weights, or set reward_clip",
        )
    return total
