"""What Prefect's pages show of a finished stage: pictures, tables and samples, and the event that a
version is there.

Numbers come from the version's manifest, which stays the record; an artifact is a view of it and
may be lost with the server. One key a run and view, so that a key's history is the run's. Rows of a
dataset are read from its first shards alone.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect.artifacts import Artifact, LinkArtifact

from quiver.flows.assets import announce
from quiver.flows.recipe import Recipe
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.store import Store, Version
from quiver.stages.report import stage as report

from . import evaluations, policies, rewards, rollouts
from .shown import attempt
from .text import key

VIEWS: dict[str, Callable[[Store, Version], list[Artifact]]] = {
    "generate": rollouts.views,
    "reward": rewards.views,
    "optimize": policies.views,
    "evaluate": evaluations.views,
}


def link_report(recipe: Recipe) -> None:
    """Bring the report of the run up to date, and link to it from the page of the flow run. Never
    raises."""
    with attempt(f"the report of {recipe.run}"):
        store = Store(recipe.store, create=False)
        if not report.is_current(store, recipe.run):
            report.write(store, recipe.run)
        path = (store.path / recipe.run / report.FILE).absolute()
        link = (
            f"{recipe.report_url.rstrip('/')}/{recipe.run}/{report.FILE}"
            if recipe.report_url
            else path.as_uri()
        )
        about = f"All of {recipe.run} on one page: `{path}`"
        LinkArtifact(
            key=key("report", recipe.run),
            link=link,
            link_text=f"report of {recipe.run}",
            description=about,
        ).create()


def publish(call: Call, outcome: Outcome) -> None:
    """Leave what there is to see of `outcome` with the task that runs now; nothing for a version
    that was there already.

    Never raises: what could not be shown is logged.
    """
    if outcome.cached:
        return
    with attempt(f"the event of {outcome.ref}"):
        announce(call, outcome)
    if call.stage in VIEWS:
        with attempt(f"what there is to see of {outcome.ref}"):
            store = Store(call.store, create=False)
            for artifact in VIEWS[call.stage](store, store.open(outcome.ref)):
                artifact.create()
