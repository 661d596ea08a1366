"""The curve of a run: one artifact of the flow run, created once and updated after each iteration.

    curve = Curve(recipe.run)
    curve.show(iterations, baseline)             # after each iteration; at most every few seconds
    curve.show(iterations, baseline, last=True)

So a run of a thousand iterations leaves one artifact, with a table of the last iterations.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from prefect.artifacts import MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext

from quiver.stages.report.plots import Panel, score_panel
from quiver.stages.report.templates import page as render

from .text import attempt, key, picture

SECONDS_BETWEEN = 10.0
_MOST_ROWS = 100


class Curve:
    """The artifact of one flow run."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._id: UUID | None = None
        self._last_shown = float("-inf")

    def show(
        self,
        iterations: list[dict[str, Any]],
        baseline: dict[str, Any] | None,
        *,
        last: bool = False,
    ) -> None:
        """Show `iterations` (as returned by `post_train`) and the evaluation before the first one.

        Does nothing outside a flow run. Never raises.
        """
        too_soon = not last and time.monotonic() - self._last_shown < SECONDS_BETWEEN
        if not iterations or too_soon or FlowRunContext.get() is None:
            return
        with attempt(f"the curve of {self._run}"):
            artifact = MarkdownArtifact(**page(self._run, iterations, baseline))
            if self._id is None:
                self._id = artifact.create().id
            else:
                update = ArtifactUpdate(data=artifact.markdown, description=artifact.description)
                with get_client(sync_client=True) as client:
                    client.update_artifact(self._id, update)
        self._last_shown = time.monotonic()


def page(
    run: str, iterations: list[dict[str, Any]], baseline: dict[str, Any] | None
) -> dict[str, str]:
    """Return the artifact's key, markdown and description: curves, and a table of the last
    iterations."""
    rewards = [(done["iteration"], done["reward_mean"], 0.0) for done in iterations]
    evaluations = [(0, baseline), *((done["iteration"], done["evaluation"]) for done in iterations)]
    measured = [(iteration, metrics) for iteration, metrics in evaluations if metrics]
    curves = picture([Panel("mean reward", rewards), score_panel(measured)], "iteration")
    scores = [metrics for _, metrics in measured]
    return {
        "key": key("iterations", run),
        "markdown": render("iterations", iterations, curves, _MOST_ROWS),
        "description": render("iterations_line", iterations, scores),
    }
