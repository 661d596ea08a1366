"""Text for Prefect's pages: untrusted text in table cells, embedded charts, and artifact keys.

Every cell of a table artifact is rendered as markdown.
"""

from __future__ import annotations

import base64
import hashlib
import re
import textwrap

from quiver.stages.report.plots import Panel, draw
from quiver.stages.report.templates import SPAN_LIMIT, quoted


def wrapped(text: str, limit: int = SPAN_LIMIT, width: int = 60) -> str:
    """Return untrusted text for a cell of a table artifact, one code span per line.

    Columns are as wide as their longest line, so lines are wrapped at `width` characters.
    """
    shown = quoted(text, limit)[1:-1]
    lines = textwrap.wrap(
        shown, width, drop_whitespace=False, replace_whitespace=False, break_on_hyphens=False
    )
    return "\n".join(f"`{line}`" for line in lines)


def picture(panels: list[Panel], x_name: str) -> str:
    """Return line charts as a markdown image with embedded data, so that nothing is fetched.

    For example: ![mean reward 0.2 → 0.5](data:image/svg+xml…). The alternative text says the same
    for pages that show no image. Returns "" if there is nothing to draw.
    """
    drawn = draw(panels, x_name)
    if drawn is None:
        return ""
    encoded = base64.b64encode(drawn.svg.encode()).decode()
    return f"![{drawn.words}](data:image/svg+xml;base64,{encoded})"


def key(view: str, run: str) -> str:
    """Return the artifact key of a run and view.

    Prefect's keys are lower-case letters, digits and dashes. Run names may also hold dots and
    underscores; a hash is added for those, so that `a.b` and `a-b` differ.
    """
    plain = re.sub("[^a-z0-9-]", "-", run)
    if plain == run:
        return f"{view}-{plain}"
    return f"{view}-{plain}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"
