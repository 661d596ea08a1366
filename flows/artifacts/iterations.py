"""The curve of a run: one page of the flow run, made once and then brought up to date after each
iteration.

    curve = Curve(recipe.run)
    curve.show(iterations, baseline)                # after each iteration; not more often than every few seconds
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

from quiver.stages.report.plots import Panel
from quiver.stages.report.words import counted, measured, number

from .curves import picture
from .shown import attempt
from .text import key, table

SECONDS_BETWEEN = 10.0
_MOST_ROWS = 100


class Curve:
    """The page of one flow run."""

    def __init__(self, run: str) -> None:
        self._run, self._id, self._spoken = run, None, float("-inf")

    def show(
        self,
        iterations: list[dict[str, Any]],
        baseline: dict[str, Any] | None,
        *,
        last: bool = False,
    ) -> None:
        """Show `iterations` (as `post_train` returns them) and the evaluation before the first one.
        Never raises."""
        if not iterations or (not last and time.monotonic() - self._spoken < SECONDS_BETWEEN):
            return
        with attempt(f"the curve of {self._run}"):
            self._id = self._put(MarkdownArtifact(**page(self._run, iterations, baseline)))
        self._spoken = time.monotonic()

    def _put(self, made: MarkdownArtifact) -> UUID:
        if self._id is None:
            return made.create().id
        with get_client(sync_client=True) as client:
            client.update_artifact(
                self._id, ArtifactUpdate(data=made.markdown, description=made.description)
            )
        return self._id


def page(
    run: str, iterations: list[dict[str, Any]], baseline: dict[str, Any] | None
) -> dict[str, str]:
    """Key, markdown and description: the curves, and a table of the last iterations."""
    rewards = [(done["iteration"], done["reward_mean"], 0.0) for done in iterations]
    found = [(0, baseline)] if baseline else []
    found += [(done["iteration"], done["evaluation"]) for done in iterations if done["evaluation"]]
    scores = [(iteration, each["score"], each["stderr"] or 0.0) for iteration, each in found]
    panels = [Panel("mean reward", rewards), *([Panel("held-out score", scores)] if scores else [])]
    said = (
        f"{counted(len(iterations), 'iteration')}: mean reward {number(rewards[0][1])} → "
        f"{number(rewards[-1][1])}"
    )
    if len(found) > 1:
        said += f", held-out score {_score(found[0][1])} → {_score(found[-1][1])}"
    rows = [_row(done) for done in iterations[: -_MOST_ROWS - 1 : -1]]
    cut = (
        f"The last {_MOST_ROWS} of {len(iterations)} iterations, newest first:"
        if len(rows) < len(iterations)
        else ""
    )
    columns = ["iteration", "policy", "mean reward", "held-out score", "seconds"]
    blocks = [picture(panels, "iteration"), cut, table(columns, rows)]
    return {
        "key": key("iterations", run),
        "markdown": "\n\n".join(filter(None, blocks)),
        "description": said,
    }


def _row(done: dict[str, Any]) -> list[Any]:
    score = _score(done["evaluation"]) if done["evaluation"] else ""
    return [
        done["iteration"],
        done["policy"],
        done["reward_mean"],
        score,
        float(sum(done["seconds"].values())),
    ]


def _score(found: dict[str, Any]) -> str:
    return measured(found["score"], found["stderr"])
