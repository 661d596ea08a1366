"""What a version was made of: its parents, and theirs, down to the sources."""

from __future__ import annotations

from typing import Any

from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import parse
from quiver.stages.common.store import Store


def parents_of(manifest: Manifest) -> dict[str, str]:
    """Versions of a store that this one was made of, each with its role."""
    return {ref: role for ref, role in _sources(manifest).items() if _is_version(ref)}


def lineage(store: Store, ref: str) -> dict[str, Any]:
    """`ref` and what it was made of, down to the sources: {"ref", "stage", "inputs": [{"role",
    "ref", …}]}.

    A version that was reached before is named without its inputs again; one that is gone is marked
    `expired`. A reward model that a hub's id or a folder names has no inputs.
    """
    seen: set[str] = set()

    def trace(ref: str) -> dict[str, Any]:
        manifest = store.open(ref).manifest
        if manifest.ref in seen:
            return {"ref": manifest.ref, "stage": manifest.stage, "inputs": [], "seen": True}
        seen.add(manifest.ref)
        inputs = []
        for source, role in _sources(manifest).items():
            node = {"role": role, "ref": source, "inputs": []}
            if _is_version(source):
                try:
                    node |= trace(source)
                except LookupError:
                    node["expired"] = True
            inputs.append(node)
        return {"ref": manifest.ref, "stage": manifest.stage, "inputs": inputs}

    return trace(ref)


def _sources(manifest: Manifest) -> dict[str, str]:
    """Models and inputs by reference, each with its role."""
    entries = (*manifest.models, *manifest.inputs)
    return {entry.ref: entry.role for entry in entries if entry.ref != manifest.ref}


def _is_version(ref: str) -> bool:
    try:
        return isinstance(parse(ref).version, int)
    except ValueError:
        return False
