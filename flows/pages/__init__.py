"""Views of finished stages on Prefect's pages: charts, tables, samples, and an event per version.

Look here for what a flow run shows besides its logs. Numbers come from the version's manifest,
which stays the record; an artifact is a view of it and may be lost with the server. There is one
artifact key per run and view, so that a key's history is the run's history. Only the first shards
of a dataset are read.
"""

from __future__ import annotations

from prefect.artifacts import LinkArtifact, MarkdownArtifact
from prefect.context import FlowRunContext
from prefect.events import emit_event

from quiver.flows.recipe import Recipe
from quiver.schemas.errors import QuiverError
from quiver.stages.common.runtime.call import Call, Outcome
from quiver.stages.common.store import Store
from quiver.stages.report import stage as report
from quiver.stages.report.gather import Manifests, evaluations_of_nights, policy_number
from quiver.stages.report.nights import HEADER, nights_of
from quiver.stages.report.plots import night_panel
from quiver.stages.report.templates import page

from .events import version_events
from .failures import attempt
from .text import key, picture
from .views import VIEWS

_MOST_NIGHTS = 100


def link_report(recipe: Recipe, policy: str | None = None) -> None:
    """Update the report of the run and link to it from the flow run's page, if there is a flow run.

    The report covers the line that ends at `policy`. Default: the run's own line. Never raises.
    """
    run = recipe.run
    with attempt(f"the report of {run}"):
        store = Store(recipe.store, create=False)
        path = report.path_of(store, run)
        if not report.is_current(store, run, policy):
            report.write(store, run, policy=policy)
        link = path.as_uri()
        if recipe.report_url:
            link = f"{recipe.report_url.rstrip('/')}/{run}/{report.FILE}"
        if FlowRunContext.get() is None:
            return
        LinkArtifact(
            key=key("report", run),
            link=link,
            link_text=f"report of {run}",
            description=f"All of {run} on one page: `{path}`",
        ).create()


def show_nights(recipe: Recipe) -> None:
    """Show the table of nights of the recipe's tag, and their scores as a curve. Never raises."""
    run = recipe.run
    tag = recipe.promotion.tag
    with attempt(f"the nights of {run}"):
        store = Store(recipe.store, create=False)
        entries = store.history(run, tag)
        measured = evaluations_of_nights(Manifests(store, QuiverError), entries)
        points = [(policy_number(each), each.metrics) for each in measured]
        curve = picture([night_panel(points)], "policy") if points else ""
        rows = nights_of(entries[-_MOST_NIGHTS:])[::-1]
        MarkdownArtifact(
            key=key("nights", run),
            markdown=page("nights", HEADER, rows, curve),
            description=f"**{run}/policy@{tag}** is **{entries[-1].ref}**; the newest night first",
        ).create()


def publish(call: Call, outcome: Outcome) -> None:
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
