"""How text, numbers and pictures are put into Prefect's pages, which read markdown: every cell of a
table artifact is rendered as such.

What a model wrote may hold markup, script, pictures that a browser would fetch, control characters,
megabytes. It is shown as one code span: escaped like in a terminal, cut, and without a backtick
that could end the span.
"""

from __future__ import annotations

import base64
import hashlib
import re
import textwrap
from typing import Any

from quiver.schemas.errors import printable
from quiver.stages.report.plots import Panel, draw
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
    lines = textwrap.wrap(
        shown, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
    )
    return "\n".join(f"`{line}`" for line in lines)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """A markdown table. Cells are our own words and numbers, or `quoted`."""
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        cells = [cell if isinstance(cell, str) else number(cell) for cell in row]
        # how many backslashes keep a pipe from ending the cell, renderers do not agree on
        lines.append([cell.replace("|", "∣") for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(panels: list[Panel], x_name: str) -> str:
    """Line charts inside the markdown itself, so that nothing is fetched: ![mean reward 0.2 →
    0.5](data:image/svg+xml…). The words say the same for a page that shows no picture; nothing
    where there is nothing to draw."""
    drawn = draw(panels, x_name)
    if drawn is None:
        return ""
    encoded = base64.b64encode(drawn.svg.encode()).decode()
    return f"![{drawn.words}](data:image/svg+xml;base64,{encoded})"


def blocks(*texts: str) -> str:
    """Markdown of those texts that are not empty, one below the other."""
    return "\n\n".join(filter(None, texts))


def key(view: str, run: str) -> str:
    """An artifact's key, one for a run and view. Prefect's keys are lower-case letters, digits and
    dashes; names of runs are that but for dots and underscores: where one holds any, its hash tells
    `a.b` from `a-b`."""
    plain = re.sub("[^a-z0-9-]", "-", run)
    if plain == run:
        return f"{view}-{plain}"
    return f"{view}-{plain}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
