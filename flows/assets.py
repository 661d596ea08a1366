"""Versions as Prefect assets: each finished one is an event with a stable key a dataset,
`quiver://<run>/<kind>`.

    quiver://arith/rollouts    prefect.asset.materialization.succeeded    {"ref": "arith/rollouts@3", "version": 3, "rows": 512, …}
    quiver://arith/policy@prod    quiver.tag.moved    {"before": "arith/policy@2", "in_use": "arith/policy@3", "why": "…", …}

So is a tag's move. An automation that matches the key and the event starts whatever shall follow. A
flow announces here; what is done by hand is told in the same form by `by_hand`. Prefect's
open-source server keeps the events and no lineage of assets; what a version was made of stands in
the event's related resources, in the manifest, and in the artifact `lineage-<run>`.
"""

from __future__ import annotations

from typing import Any

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from prefect.events import emit_event

from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import parse
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.store import Store
from quiver.stages.common.store.tags import Entry

EVENT = "prefect.asset.materialization.succeeded"
MOVED = "quiver.tag.moved"
_MOST_RELATED = 50  # a server takes 100, the run's own resources among them
_BESIDE = ("advantages", "updates")  # kinds that optimize writes beside the policy that names them


def asset_key(ref: str) -> str:
    """`quiver://arith/rollouts` for `arith/rollouts@3`."""
    return f"quiver://{ref.partition('@')[0]}"


def announce(call: Call, outcome: Outcome) -> None:
    """Emit one event for each version that the stage wrote; it is sent by a thread of Prefect's,
    and nobody waits for it."""
    for event in version_events(call, outcome):
        emit_event(**event)


def announce_move(name: str, entry: Entry) -> None:
    """Emit the event that the tag `name` = run/kind@tag moved; an automation may start what puts
    the version to use."""
    emit_event(**moved_event(name, entry))


def version_events(call: Call, outcome: Outcome) -> list[dict[str, Any]]:
    """One event for each version that the stage wrote, as `emit_event` takes it."""
    store = Store(call.store, create=False)
    beside = (
        [outcome.metrics[kind] for kind in _BESIDE if kind in outcome.metrics]
        if call.stage == "optimize"
        else []
    )
    return [_version_event(store.open(ref).manifest) for ref in (*beside, outcome.ref)]


def moved_event(name: str, entry: Entry) -> dict[str, Any]:
    """The event of a tag's move, as `emit_event` takes it."""
    resource = {"prefect.resource.id": f"quiver://{name}", "prefect.resource.name": name}
    return {"event": MOVED, "resource": resource, "payload": told(entry)}


def told(entry: Entry) -> dict[str, Any]:
    """What became of a tag, as plain JSON: what it was decided on, why, the version in use before
    and since, and when."""
    return {
        **entry.about,
        "why": entry.why,
        "before": entry.before,
        "in_use": entry.ref,
        "at": entry.at,
    }


def _version_event(manifest: Manifest) -> dict[str, Any]:
    asset = Asset(
        key=asset_key(manifest.ref),
        properties=AssetProperties(name=f"{manifest.run}/{manifest.kind}"),
    )
    related = [_upstream(ref, role) for ref, role in parents_of(manifest).items()][:_MOST_RELATED]
    payload = {
        "ref": manifest.ref,
        "run": manifest.run,
        "kind": manifest.kind,
        "version": manifest.version,
        "rows": manifest.rows,
        "stage": manifest.stage,
        "content_hash": manifest.content_hash,
    }
    return {
        "event": EVENT,
        "resource": AssetContext.asset_as_resource(asset),
        "related": [*related, AssetContext.related_materialized_by("quiver")],
        "payload": payload,
    }


def _upstream(ref: str, role: str) -> dict[str, str]:
    return {
        **AssetContext.asset_as_related(Asset(key=asset_key(ref))),
        "quiver.ref": ref,
        "quiver.role": role,
    }


def parents_of(manifest: Manifest) -> dict[str, str]:
    """Versions of a store that this one was made of, each with its role. (A reward model may be
    named by a hub's id.)"""
    named = [(entry.ref, entry.role) for entry in (*manifest.models, *manifest.inputs)]
    return {ref: role for ref, role in named if _is_version(ref) and ref != manifest.ref}


def _is_version(text: str) -> bool:
    try:
        return isinstance(parse(text).version, int)
    except ValueError:
        return False
