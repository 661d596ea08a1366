"""Code that Prefect's pages share: artifact keys, untrusted text in table cells, embedded charts,
and the handling of a page that fails.

Every cell of a table artifact is rendered as markdown.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

from quiver.flows.look.plots import Panel, draw
from quiver.flows.look.templates import SPAN_LIMIT, quoted
from quiver.schemas.errors import printable

log = logging.getLogger("quiver")
_seen_failures: set[str] = set()


@contextmanager
def attempt(action: str) -> Iterator[None]:
    """Run the block; if it fails, log `action` and the error.

    Each type of error is logged once per process as a warning, later ones at level DEBUG.
    """
    try:
        yield
    except Exception as error:  # Any error: the version is finished, and this is only a view of it.
        failure = type(error).__name__
        level = logging.DEBUG if failure in _seen_failures else logging.WARNING
        _seen_failures.add(failure)
        message = "not on Prefect's pages: %s (%s: %s); the run continues"
        log.log(level, message, action, failure, printable(error))


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
