"""Line charts as a picture inside the markdown itself: nothing is fetched for it.

    picture([Panel("mean reward", [(1, 0.2, 0.0), (2, 0.5, 0.0)])], "iteration")     # ![mean reward 0.2 → 0.5](data:image/svg+xml…)

The words beside the picture say the same, for a page that shows none.
"""

from __future__ import annotations

import base64

from quiver.stages.report.plots import Panel, said, svg, thinned


def picture(panels: list[Panel], x_name: str) -> str:
    """Markdown of one picture with two panels a row; a panel without any value is left out, and
    without panels there is none."""
    shown = thinned(panels)
    if not shown:
        return ""
    encoded = base64.b64encode(svg(shown, x_name).encode()).decode()
    return f"![{said(shown)}](data:image/svg+xml;base64,{encoded})"
