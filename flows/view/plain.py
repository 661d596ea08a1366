"""The plain table of `quiver view`, with the same cells as the terminal application."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quiver.schemas.errors import printable
from quiver.stages.report.words import number

from .paired import Paired

_GAP = 2
"""Blanks between columns."""
_NARROWEST = 12


class Column(NamedTuple):
    """A column of the table of rollouts."""

    name: str
    """Quantity to sort by; "" for a column that cannot be sorted."""
    title: str
    width: int


def columns_of(paired: Paired, width: int = 180) -> list[Column]:
    """Return the columns that fit into `width` characters; text columns share what the numbers
    leave."""
    joined = paired.first
    columns = [Column("", "row", 7)]
    if paired.second is not None:
        score = joined.score_name
        columns += [Column(score, f"{score} A", 10), Column("", f"{score} B", 10)]
        columns += [Column("gain", "B − A", 10)]
    elif joined.score_name:
        columns.append(Column(joined.score_name, joined.score_name, 10))
    columns.append(Column("tokens", "tokens", 6))
    if joined.has_turns:
        columns += [Column("turns", "turns", 6), Column("", "end_reason", 17)]
    else:
        columns.append(Column("", "end", 6))
    if joined.advantages is not None:
        columns += [Column("advantage", "advantage", 10), Column("mean_ratio", "ratio", 7)]
    texts = ["prompt", "reference", "completion"]
    if paired.second is not None:
        texts[2:] = ["completion A", "completion B"]
    left = width - sum(column.width + _GAP for column in columns) - _GAP * len(texts)
    shares = {"prompt": 0.3, "reference": 0.12}
    share = (1 - sum(shares.values())) / (len(texts) - 2)
    widths = [max(int(left * shares.get(name, share)), _NARROWEST) for name in texts]
    return columns + [Column("", name, each) for name, each in zip(texts, widths, strict=True)]


def cells_of(
    paired: Paired, row: dict[str, Any], partner: dict[str, Any], columns: list[Column]
) -> list[str]:
    """Return the cells of one rollout, each on one line without control characters."""
    score, score_b = row.get(paired.first.score_name), None
    if paired.second is not None:
        score_b = partner.get(paired.second.score_name)
    gain = None if score is None or score_b is None else score_b - score
    reference = row.get("reference")
    contents = {
        "row": str(row["position"] + 1),
        "B − A": "–" if gain is None else f"{gain:+.4g}",
        "tokens": str(row["tokens"]),
        "turns": str(len(row.get("turns", ()))),
        "end": row["finish_reason"],
        "end_reason": row.get("end_reason"),
        "advantage": number(row.get("advantage")) if row.get("kept") else "dropped",
        "ratio": number(row.get("mean_ratio")),
        "prompt": row.get("prompt", row["group_id"]),
        "reference": "" if reference is None else str(reference),
        "completion": row["completion_text"],
        "completion A": row["completion_text"],
        "completion B": partner.get("completion_text", "–"),
    }
    if paired.second is not None:
        contents |= {f"{paired.first.score_name} A": number(score)}
        contents |= {f"{paired.first.score_name} B": number(score_b)}
    elif paired.first.score_name:
        contents |= {paired.first.score_name: number(score)}
    return [printable(contents[column.title], column.width) for column in columns]


def lines_of(paired: Paired, positions: Sequence[int] | np.ndarray) -> list[str]:
    """Return the rollouts at `positions` as lines below a header."""
    columns = columns_of(paired)
    rows = paired.first.rows(positions)
    partners = paired.partners([row["position"] for row in rows])
    table = [[column.title for column in columns]]
    for row, partner in zip(rows, partners, strict=True):
        table.append(cells_of(paired, row, partner, columns))
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table]
