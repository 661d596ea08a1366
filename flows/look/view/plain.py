"""The table of rollouts of `quiver view`: columns and cells, for the terminal application and for
plain output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from quiver.flows.look.paired import Paired
from quiver.flows.look.words import aligned, cell, number
from quiver.schemas.errors import printable
from quiver.schemas.rollouts import END_REASONS

_GAP = 2
"""Blanks between columns."""
_NARROWEST = 12
_LONGEST_END = max(map(len, END_REASONS))
_TEXT_SHARES = {"prompt": 0.3, "reference": 0.12, "completion": 0.58}
"""Shares of the text columns in what the numbers leave."""


class Column(NamedTuple):
    """A column of the table of rollouts."""

    title: str
    width: int
    name: str = ""
    """Quantity to sort by; "" for a column that cannot be sorted."""


def columns_of(paired: Paired, width: int = 180) -> list[Column]:
    """Return the columns that fit into `width` characters; text columns share what the numbers
    leave."""
    joined = paired.first
    score = joined.score_name
    columns = [Column("row", 7)]
    shares = dict(_TEXT_SHARES)
    if paired.second is not None:
        columns += [Column(f"{score} A", 10, score), Column(f"{score} B", 10)]
        columns += [Column("B − A", 10, "gain")] if "gain" in joined.numbers else []
        half = shares.pop("completion") / 2
        shares |= {"completion A": half, "completion B": half}
    elif score:
        columns.append(Column(score, 10, score))
    columns.append(Column("tokens", 6, "tokens"))
    if joined.has_turns:
        columns += [Column("turns", 6, "turns"), Column("end_reason", _LONGEST_END)]
    else:
        columns.append(Column("end", 6))
    if "advantages" in joined.shards:
        columns += [Column("advantage", 10, "advantage"), Column("ratio", 7, "mean_ratio")]
    left = width - sum(column.width + _GAP for column in columns) - _GAP * len(shares)
    return columns + [
        Column(name, max(int(left * share), _NARROWEST)) for name, share in shares.items()
    ]


def cells_of(
    paired: Paired, row: dict[str, Any], partner: dict[str, Any], columns: list[Column]
) -> list[str]:
    """Return the cells of one rollout, each on one line without control characters."""
    score_name = paired.first.score_name
    score = row.get(score_name)
    contents = {
        "row": row["position"] + 1,
        score_name: number(score),
        "tokens": row["tokens"],
        "turns": len(row.get("turns", ())),
        "end": row["finish_reason"],
        "end_reason": row.get("end_reason"),
        "advantage": number(row.get("advantage")) if row.get("kept") else "dropped",
        "ratio": number(row.get("mean_ratio")),
        "prompt": row.get("prompt", row["group_id"]),
        "reference": "" if row.get("reference") is None else row["reference"],
        "completion": row["completion_text"],
    }
    if paired.second is not None:
        score_b = partner.get(paired.second.score_name)
        is_scored = score is not None and score_b is not None
        contents |= {
            f"{score_name} A": number(score),
            f"{score_name} B": number(score_b),
            "B − A": f"{score_b - score:+.4g}" if is_scored else "–",
            "completion A": row["completion_text"],
            "completion B": partner.get("completion_text", "–"),
        }
    return [printable(contents[column.title], column.width) for column in columns]


def lines_of(paired: Paired, positions: Sequence[int] | np.ndarray) -> list[str]:
    """Return the rollouts at `positions` as lines below a header."""
    columns = columns_of(paired)
    rows = zip(paired.first.rows(positions), paired.partners(positions), strict=True)
    table = [cells_of(paired, row, partner, columns) for row, partner in rows]
    return aligned([[column.title for column in columns], *table])


def group_lines(groups: pa.Table) -> list[str]:
    """Return the groups of `Joined.groups` as lines below a header."""
    table = groups.drop_columns("position")
    rows = [[cell(content) for content in row.values()] for row in table.to_pylist()]
    columns = range(1, table.num_columns)
    return aligned([[printable(name) for name in table.column_names], *rows], right=columns)
