"""Versions as Prefect assets: each finished version is an event with a stable key per dataset.

Look here to write an automation. The key is `quiver://<run>/<kind>`; a tag's move is an event too:

    quiver://arith/rollouts       prefect.asset.materialization.succeeded
                                  {"ref": "arith/rollouts@3", "version": 3, "rows": 512, …}
    quiver://arith/policy@prod    quiver.tag.moved
                                  {"before": "arith/policy@2", "in_use": "arith/policy@3", …}

An automation that matches key and event can start a deployment. Flows emit these events; for
commands outside a flow, `prefect_server` posts them in the same form. Prefect's open-source server
keeps the events but no lineage of assets. The inputs of a version are in the event's related
resources, in the manifest, and in the artifact `lineage-<run>`.
"""

from __future__ import annotations

from typing import Any

from quiver.flows.look.lineage import BESIDE_A_POLICY, parents_of
from quiver.schemas.manifest import Manifest
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.store import Store
from quiver.stages.core.store.tags import Entry

EVENT = "prefect.asset.materialization.succeeded"
MOVED = "quiver.tag.moved"
_MOST_RELATED = 50  # A server takes 100, including the run's own resources.


def version_events(call: Call, outcome: Outcome) -> list[dict[str, Any]]:
    """Return one event for each version that the stage wrote, as arguments of `emit_event`."""
    store = Store(call.store, create=False)
    refs = [outcome.ref]
    if call.stage == "optimize":
        refs[:0] = [outcome.metrics[kind] for kind in BESIDE_A_POLICY if kind in outcome.metrics]
    return [version_event(store.open(ref).manifest) for ref in refs]


def version_event(manifest: Manifest) -> dict[str, Any]:
    """Return the event for a finished version, as arguments of `emit_event`."""
    parents = [
        {
            "prefect.resource.id": _asset_key(ref),
            "prefect.resource.role": "asset",
            "quiver.ref": ref,
            "quiver.role": role,
        }
        for ref, role in parents_of(manifest).items()
    ]
    author = {"prefect.resource.id": "quiver", "prefect.resource.role": "asset-materialized-by"}
    return {
        "event": EVENT,
        "resource": {
            "prefect.resource.id": _asset_key(manifest.ref),
            "prefect.resource.name": f"{manifest.run}/{manifest.kind}",
        },
        "related": [*parents[:_MOST_RELATED], author],
        "payload": {
            "ref": manifest.ref,
            **manifest.model_dump(
                include={"run", "kind", "version", "rows", "stage", "content_hash"}
            ),
        },
    }


def moved_event(name: str, entry: Entry) -> dict[str, Any]:
    """Return the event that the tag `name` = run/kind@tag moved, as arguments of `emit_event`.

    An automation may start a deployment of the version by it.
    """
    resource = {"prefect.resource.id": f"quiver://{name}", "prefect.resource.name": name}
    return {"event": MOVED, "resource": resource, "payload": payload_of(entry)}


def payload_of(entry: Entry) -> dict[str, Any]:
    """Return an entry of a tag's history as plain JSON: its grounds, why, the version before, the
    version in use, and when."""
    return {
        **entry.about,
        "why": entry.why,
        "before": entry.before,
        "in_use": entry.ref,
        "at": entry.at,
    }


def _asset_key(ref: str) -> str:
    """Return `quiver://arith/rollouts` for `arith/rollouts@3`."""
    return f"quiver://{ref.partition('@')[0]}"
