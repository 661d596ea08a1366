"""What Prefect's pages show of a finished stage: pictures, tables and samples, and the event that a version is there.

Numbers come from the version's manifest, which stays the record; an artifact is a view of it and may be lost with the server. One
key a run and view, so that a key's history is the run's. Rows of a dataset are read from its first shards alone.
"""

from __future__ import annotations

from collections.abc import Callable

from prefect.artifacts import Artifact

from flows.assets import announce
from stages.common.process import Call, Outcome
from stages.common.store import Store, Version

from . import evaluations, policies, rewards, rollouts
from .shown import attempt

VIEWS: dict[str, Callable[[Store, Version], list[Artifact]]] = {
    "generate": rollouts.views,
    "reward": rewards.views,
    "optimize": policies.views,
    "evaluate": evaluations.views,
}


def publish(call: Call, outcome: Outcome) -> None:
    """Leave what there is to see of `outcome` with the task that runs now; nothing for a version that was there already.

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
