"""The curve of a run: one page of the flow run, made once and then brought up to date after each
iteration.

    curve = Curve(recipe.run)
    curve.show(iterations, baseline)             # after each iteration; at most every few seconds
    curve.show(iterations, baseline, last=True)

So a run of a thousand iterations leaves one artifact, and its table the last of them.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from prefect.artifacts import MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate

from quiver.stages.report.plots import Panel, score_panel
from quiver.stages.report.words import counted, number, score_of

from .failures import attempt
from .text import blocks, key, picture, table

SECONDS_BETWEEN = 10.0
_MOST_ROWS = 100


class Curve:
    """The page of one flow run."""

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
        """Show `iterations` (as `post_train` returns them) and the evaluation before the first one.
        Never raises."""
        too_soon = not last and time.monotonic() - self._last_shown < SECONDS_BETWEEN
        if not iterations or too_soon:
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
    """Key, markdown and description: the curves, and a table of the last iterations."""
    rewards = [(done["iteration"], done["reward_mean"], 0.0) for done in iterations]
    evaluations = [(0, baseline), *((done["iteration"], done["evaluation"]) for done in iterations)]
    measured = [(iteration, metrics) for iteration, metrics in evaluations if metrics]
    description = (
        f"{counted(len(iterations), 'iteration')}: mean reward {number(rewards[0][1])} → "
        f"{number(rewards[-1][1])}"
    )
    if len(measured) > 1:
        description += f", held-out score {score_of(measured[0][1])} → {score_of(measured[-1][1])}"
    rows = [
        [
            done["iteration"],
            done["policy"],
            done["reward_mean"],
            score_of(done["evaluation"]) if done["evaluation"] else "",
            float(sum(done["seconds"].values())),
        ]
        for done in iterations[: -_MOST_ROWS - 1 : -1]
    ]
    newest = ""
    if len(rows) < len(iterations):
        newest = f"The last {_MOST_ROWS} of {len(iterations)} iterations, newest first:"
    columns = ["iteration", "policy", "mean reward", "held-out score", "seconds"]
    panels = [Panel("mean reward", rewards), score_panel(measured)]
    return {
        "key": key("iterations", run),
        "markdown": blocks(picture(panels, "iteration"), newest, table(columns, rows)),
        "description": description,
    }
