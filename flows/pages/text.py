"""What Prefect's pages take besides markdown's own words: foreign text in a table's cells, pictures
that nothing has to fetch, and the keys of artifacts. Every cell of a table artifact is rendered as
markdown."""

from __future__ import annotations

import base64
import hashlib
import re
import textwrap

from quiver.stages.report.plots import Panel, draw
from quiver.stages.report.templates import SPAN_LIMIT, quoted


def wrapped(text: str, limit: int = SPAN_LIMIT, width: int = 60) -> str:
    """Foreign text for a cell of a table artifact, whose columns are as wide as their longest line:
    one code span a line."""
    shown = quoted(text, limit)[1:-1]
    lines = textwrap.wrap(
        shown, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
    )
    return "\n".join(f"`{line}`" for line in lines)


def picture(panels: list[Panel], x_name: str) -> str:
    """Line charts inside the markdown itself, so that nothing is fetched: ![mean reward 0.2 →
    0.5](data:image/svg+xml…). The words say the same for a page that shows no picture; nothing
    where there is nothing to draw."""
    drawn = draw(panels, x_name)
    if drawn is None:
        return ""
    encoded = base64.b64encode(drawn.svg.encode()).decode()
    return f"![{drawn.words}](data:image/svg+xml;base64,{encoded})"


def key(view: str, run: str) -> str:
    """An artifact's key, one for a run and view. Prefect's keys are lower-case letters, digits and
    dashes; names of runs are that but for dots and underscores: where one holds any, its hash tells
    `a.b` from `a-b`."""
    plain = re.sub("[^a-z0-9-]", "-", run)
    if plain == run:
        return f"{view}-{plain}"
    return f"{view}-{plain}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
