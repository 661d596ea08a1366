"""Format numbers, sizes and counts for people. Look here to change how figures are printed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich import filesize

from quiver.schemas.errors import LineageError, did_you_mean, printable

size = filesize.decimal
"""Returns bytes as text, such as `13.1 kB`."""
_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


def rounded(cell: Any) -> Any:
    """Round a float to four significant digits, for tables; return anything else unchanged."""
    return float(f"{cell:.4g}") if isinstance(cell, float) else cell


def number(amount: float | None) -> str:
    """Return a number as text with four significant digits; a dash for None."""
    if amount is None:
        return "–"
    return f"{amount:,}" if isinstance(amount, int) else f"{amount:.4g}"


def cell(content: Any) -> str:
    """Return any content as text; foreign text with its control characters escaped."""
    if isinstance(content, bool):
        return "yes" if content else "no"
    if isinstance(content, int | float):
        return number(content + 0)  # no −0
    return number(None) if content is None else printable(content)


def with_short_hashes(text: str) -> str:
    """Cut each SHA-256 hash in a text to its first 12 digits."""
    return _HASH.sub(r"\1", text)


def share(portion: float | None) -> str:
    """Return a share in percent; a dash for None."""
    return number(None) if portion is None else f"{portion:.1%}"


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with the columns below one another.

    Args:
        right: Indices of the columns to align right.
    """
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if index in right else text.ljust(width)
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def score_of(metrics: Mapping[str, Any]) -> str:
    """Return the score of an evaluation with its standard error and `unscored_of`, from its
    metrics."""
    stderr = metrics["stderr"]
    error = "–" if stderr is None else f"{stderr:.2g}"
    return f"{number(metrics['score'])} ± {error}{unscored_of(metrics)}"


def unscored_of(metrics: Mapping[str, Any]) -> str:
    """Return how many answers got no score, and how they count: ` (2 cut off count as 0, 3 left
    out)`. Empty if all were scored."""
    notes = []
    if metrics.get("limited"):
        notes.append(f"{metrics['limited']:,} cut off count as {number(metrics['limited_score'])}")
    if metrics.get("null"):
        notes.append(f"{metrics['null']:,} left out")
    return f" ({', '.join(notes)})" if notes else ""


def counted(count: int, noun: str) -> str:
    """Return `1 step`, `2,048 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def no_run(name: str, runs: Sequence[str]) -> LineageError:
    """Return the error that no version belongs to a run of this name; `runs`: those that exist."""
    problem = f"has no versions{did_you_mean(name, runs)}"
    return LineageError(f"run {printable(name)}", problem, next="quiver ls")
