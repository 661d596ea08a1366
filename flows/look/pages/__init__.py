"""Views of finished stages on Prefect's pages: charts, tables, samples, and an event per version.

Look here for what a flow run shows besides its logs. Numbers come from the version's manifest,
which stays the record; an artifact is a view of it and may be lost with the server. There is one
artifact key per run and view, so that a key's history is the run's history. Only the first shards
of a dataset are read.
"""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from prefect.artifacts import LinkArtifact, MarkdownArtifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.events import emit_event

from quiver.flows.look import stage as report
from quiver.flows.look.gather import Manifests, evaluations_of_nights, policy_number
from quiver.flows.look.nights import HEADER, nights_of
from quiver.flows.look.plots import Panel, night_panel, score_panel
from quiver.flows.look.templates import page
from quiver.schemas.errors import QuiverError
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.store import Store
from quiver.stages.core.store.places import is_url

from .events import version_events
from .text import attempt, key, picture
from .views import VIEWS

SECONDS_BETWEEN = 10.0
"""Between two updates of a curve."""
_MOST_NIGHTS = 100
_MOST_ROWS = 100


def link_report(store: str, run: str, url: str | None, policy: str | None = None) -> str | None:
    """Update the report of the run and link to it from the flow run's page, if there is a flow run.

    The report covers the line that ends at `policy`. Default: the run's own line. `url`: where the
    store's folder is served, if it is.

    Returns the path of the report, or None if it could not be written. Never raises.
    """
    written = None
    with attempt(f"the report of {run}"):
        path = report.write(Store(store, create=False), run, policy=policy)
        written = str(path)
        link = path.as_uri()
        if url and not is_url(store):  # the report of a store in a bucket is a file of this host
            link = f"{url.rstrip('/')}/{run}/{report.FILE}"
        if FlowRunContext.get() is None:
            return written
        LinkArtifact(
            key=key("report", run),
            link=link,
            link_text=f"report of {run}",
            description=f"All of {run} on one page: `{path}`",
        ).create()
    return written


def show_nights(store: str, run: str, tag: str) -> None:
    """Show the table of nights of the tag, and their scores as a curve. Never raises."""
    with attempt(f"the nights of {run}"):
        opened = Store(store, create=False)
        entries = opened.history(run, tag)
        measured = evaluations_of_nights(Manifests(opened, QuiverError), entries)
        points = [(policy_number(each), each.metrics) for each in measured]
        curve = picture([night_panel(points)], "policy") if points else ""
        rows = nights_of(entries[-_MOST_NIGHTS:])[::-1]
        MarkdownArtifact(
            key=key("nights", run),
            markdown=page("nights", HEADER, rows, curve),
            description=f"**{run}/policy@{tag}** is **{entries[-1].ref}**; the newest night first",
        ).create()


def show_version(call: Call, outcome: Outcome) -> None:
    """Attach the views of `outcome` to the running task.

    Does nothing for a version that existed before, or outside a flow run. Never raises: failures
    are logged.
    """
    if outcome.cached or FlowRunContext.get() is None:
        return
    with attempt(f"the event of {outcome.ref}"):
        for event in version_events(call, outcome):
            emit_event(**event)  # Sent by a thread of Prefect's, without waiting.
    if call.stage in VIEWS:
        with attempt(f"what there is to see of {outcome.ref}"):
            store = Store(call.store, create=False)
            for artifact in VIEWS[call.stage](store, store.open(outcome.ref)):
                artifact.create()


class Curve:
    """The curve of a run: one artifact of the flow run, created once and updated after each
    iteration. So a run of a thousand iterations leaves one artifact, with a table of the last ones.

    curve = Curve(recipe.run)
    curve.show(iterations, baseline)             # after each iteration; at most every few seconds
    curve.show(iterations, baseline, last=True)
    """

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
            artifact = MarkdownArtifact(**iterations_page(self._run, iterations, baseline))
            if self._id is None:
                self._id = artifact.create().id
            else:
                update = ArtifactUpdate(data=artifact.markdown, description=artifact.description)
                with get_client(sync_client=True) as client:
                    client.update_artifact(self._id, update)
        self._last_shown = time.monotonic()


def iterations_page(
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
        "markdown": page("iterations", iterations, curves, _MOST_ROWS),
        "description": page("iterations_line", iterations, scores),
    }
