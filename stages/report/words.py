"""Numbers, sizes and counts as a person reads them."""

from __future__ import annotations

from typing import Any


def rounded(value: Any) -> Any:
    """A number with four significant digits, for tables; all else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def number(value: float | None) -> str:
    """The same as text; a dash where there is none."""
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def measured(score: float, stderr: float | None) -> str:
    """A score with its standard error."""
    return f"{number(score)} ± {'–' if stderr is None else f'{stderr:.2g}'}"


def counted(count: int, what: str) -> str:
    """`1 step`, `2,048 steps`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Bytes as a person reads them: `13.1 kB`."""
    amount, units = float(count), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    for larger in units:
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
