"""Versions as Prefect assets: each finished one is an event with a stable key a dataset,
`quiver://<run>/<kind>`.

    quiver://arith/rollouts       prefect.asset.materialization.succeeded
                                  {"ref": "arith/rollouts@3", "version": 3, "rows": 512, …}
    quiver://arith/policy@prod    quiver.tag.moved
                                  {"before": "arith/policy@2", "in_use": "arith/policy@3", …}

So is a tag's move. An automation that matches the key and the event starts whatever shall follow. A
flow emits them; what is done by hand is told in the same form by `by_hand`. Prefect's
open-source server keeps the events and no lineage of assets; what a version was made of stands in
the event's related resources, in the manifest, and in the artifact `lineage-<run>`.
"""

from __future__ import annotations

from typing import Any

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext

from quiver.schemas.manifest import Manifest
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.store import Store
from quiver.stages.common.store.tags import Entry
from quiver.stages.report.lineage import parents_of

EVENT = "prefect.asset.materialization.succeeded"
MOVED = "quiver.tag.moved"
_MOST_RELATED = 50  # a server takes 100, the run's own resources among them
_OF_OPTIMIZE = ("advantages", "updates")  # kinds beside the policy, which names them


def version_events(call: Call, outcome: Outcome) -> list[dict[str, Any]]:
    """One event for each version that the stage wrote, as `emit_event` takes it."""
    store = Store(call.store, create=False)
    refs = [outcome.ref]
    if call.stage == "optimize":
        refs[:0] = [outcome.metrics[kind] for kind in _OF_OPTIMIZE if kind in outcome.metrics]
    return [version_event(store.open(ref).manifest) for ref in refs]


def version_event(manifest: Manifest) -> dict[str, Any]:
    """The event that this version is there, as `emit_event` takes it."""
    run_and_kind = f"{manifest.run}/{manifest.kind}"
    asset = Asset(key=_asset_key(manifest.ref), properties=AssetProperties(name=run_and_kind))
    parents = [
        {
            **AssetContext.asset_as_related(Asset(key=_asset_key(ref))),
            "quiver.ref": ref,
            "quiver.role": role,
        }
        for ref, role in parents_of(manifest).items()
    ]
    return {
        "event": EVENT,
        "resource": AssetContext.asset_as_resource(asset),
        "related": [*parents[:_MOST_RELATED], AssetContext.related_materialized_by("quiver")],
        "payload": {
            "ref": manifest.ref,
            **manifest.model_dump(
                include={"run", "kind", "version", "rows", "stage", "content_hash"}
            ),
        },
    }


def moved_event(name: str, entry: Entry) -> dict[str, Any]:
    """The event that the tag `name` = run/kind@tag moved, as `emit_event` takes it; an automation
    may start what puts the version to use."""
    resource = {"prefect.resource.id": f"quiver://{name}", "prefect.resource.name": name}
    return {"event": MOVED, "resource": resource, "payload": payload_of(entry)}


def payload_of(entry: Entry) -> dict[str, Any]:
    """What became of a tag, as plain JSON: what it was decided on, why, the version in use before
    and since, and when."""
    return {
        **entry.about,
        "why": entry.why,
        "before": entry.before,
        "in_use": entry.ref,
        "at": entry.at,
    }


def _asset_key(ref: str) -> str:
    """`quiver://arith/rollouts` for `arith/rollouts@3`."""
    return f"quiver://{ref.partition('@')[0]}"
