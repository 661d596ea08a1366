"""Numbers, sizes and counts as a person reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def rounded(cell: Any) -> Any:
    """A number with four significant digits, for tables; all else as it is."""
    return float(f"{cell:.4g}") if isinstance(cell, float) else cell


def number(amount: float | None) -> str:
    """The same as text; a dash where there is none."""
    if amount is None:
        return "–"
    return f"{amount:,}" if isinstance(amount, int) else f"{amount:.4g}"


def score_of(metrics: Mapping[str, Any]) -> str:
    """The score of an evaluation with its standard error, of its metrics, and `unscored_of`."""
    stderr = metrics["stderr"]
    error = "–" if stderr is None else f"{stderr:.2g}"
    return f"{number(metrics['score'])} ± {error}{unscored_of(metrics)}"


def unscored_of(metrics: Mapping[str, Any]) -> str:
    """How many answers no scorer gave a number for, and what became of them: ` (2 cut off count as
    0, 3 left out)`; empty if there are none."""
    notes = []
    if metrics.get("limited"):
        notes.append(f"{metrics['limited']:,} cut off count as {number(metrics['limited_score'])}")
    if metrics.get("null"):
        notes.append(f"{metrics['null']:,} left out")
    return f" ({', '.join(notes)})" if notes else ""


def counted(count: int, noun: str) -> str:
    """`1 step`, `2,048 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size(num_bytes: int) -> str:
    """Bytes as a person reads them: `13.1 kB`."""
    if num_bytes < 1000:
        return f"{num_bytes} B"
    amount = num_bytes / 1000
    unit = "kB"
    for larger in ("MB", "GB"):
        if amount >= 1000:
            amount /= 1000
            unit = larger
    return f"{amount:.1f} {unit}"
