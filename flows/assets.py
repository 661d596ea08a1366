"""Versions as Prefect assets: each finished one is an event with a stable key a dataset, `quiver://<run>/<kind>`.

    quiver://arith/rollouts    prefect.asset.materialization.succeeded    {"ref": "arith/rollouts@3", "version": 3, "rows": 512, …}

An automation that matches the key and the event starts whatever shall follow a new version. Prefect's open-source server keeps the
events and no lineage of assets; what a version was made of stands in the event's related resources, in the manifest, and in the
artifact `lineage-<run>`.
"""

from __future__ import annotations

from prefect.assets import Asset, AssetProperties
from prefect.context import AssetContext
from prefect.events import emit_event

from schemas.manifest import Manifest
from schemas.refs import parse
from stages.common.process import Call, Outcome
from stages.common.store import Store

EVENT = "prefect.asset.materialization.succeeded"
_MOST_RELATED = 50  # a server takes 100, the run's own resources among them
_BESIDE = ("advantages", "updates")  # kinds that optimize writes beside the policy that names them


def asset_key(ref: str) -> str:
    """`quiver://arith/rollouts` for `arith/rollouts@3`."""
    return f"quiver://{ref.partition('@')[0]}"


def announce(call: Call, outcome: Outcome) -> None:
    """Emit one event for each version that the stage wrote; it is sent by a thread of Prefect's, and nobody waits for it."""
    store = Store(call.store, create=False)
    beside = [outcome.metrics[kind] for kind in _BESIDE if kind in outcome.metrics] if call.stage == "optimize" else []
    for ref in (*beside, outcome.ref):
        _emit(store.open(ref).manifest)


def _emit(manifest: Manifest) -> None:
    asset = Asset(key=asset_key(manifest.ref), properties=AssetProperties(name=f"{manifest.run}/{manifest.kind}"))
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
    emit_event(
        event=EVENT,
        resource=AssetContext.asset_as_resource(asset),
        related=[*related, AssetContext.related_materialized_by("quiver")],
        payload=payload,
    )


def _upstream(ref: str, role: str) -> dict[str, str]:
    return {**AssetContext.asset_as_related(Asset(key=asset_key(ref))), "quiver.ref": ref, "quiver.role": role}


def parents_of(manifest: Manifest) -> dict[str, str]:
    """Versions of a store that this one was made of, each with its role. (A reward model may be named by a hub's id.)"""
    named = [(entry.ref, entry.role) for entry in (*manifest.models, *manifest.inputs)]
    return {ref: role for ref, role in named if _is_version(ref) and ref != manifest.ref}


def _is_version(text: str) -> bool:
    try:
        return isinstance(parse(text).version, int)
    except ValueError:
        return False
