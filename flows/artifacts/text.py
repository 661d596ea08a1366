"""How text and numbers are put into Prefect's pages, which read markdown: every cell of a table
artifact is rendered as such.

What a model wrote may hold markup, script, pictures that a browser would fetch, control characters,
megabytes. It is shown as one code span: escaped like in a terminal, cut, and without a backtick
that could end the span.
"""

from __future__ import annotations

import hashlib
import re
import textwrap
from typing import Any

from quiver.schemas.errors import printable
from quiver.stages.report.words import number

LIMIT = 300


def quoted(text: str, limit: int = LIMIT) -> str:
    """Foreign text as one code span of at most `limit` characters, an ellipsis where it was cut;
    nothing stays nothing."""
    shown = printable(text[: limit + 1], limit).replace("`", "ˋ")
    return f"`{shown}`" if shown else ""


def wrapped(text: str, limit: int = LIMIT, width: int = 60) -> str:
    """The same for a cell of a table artifact, whose columns are as wide as their longest line: one
    code span a line."""
    shown = quoted(text, limit)[1:-1]
    parts = textwrap.wrap(
        shown, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
    )
    return "\n".join(f"`{part}`" for part in parts)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """A markdown table. Cells are our own words and numbers, or `quoted`."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    """With another sign for the pipe: how many backslashes keep it from ending the cell, renderers
    do not agree on."""
    text = value if isinstance(value, str) else number(value)
    return text.replace("|", "∣")


def key(view: str, run: str) -> str:
    """An artifact's key, one for a run and view. Prefect's keys are lower-case letters, digits and
    dashes; names of runs are that but for dots and underscores: where one holds any, its hash tells
    `a.b` from `a-b`."""
    plain = re.sub("[^a-z0-9-]", "-", run)
    return "-".join(
        [view, plain]
        if plain == run
        else [view, plain, hashlib.sha256(run.encode()).hexdigest()[:6]]
    )
