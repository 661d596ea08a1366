"""Trace a version back to its sources: its parents, their parents, and so on. Look here for
`quiver lineage`."""

from __future__ import annotations

from typing import Any

from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import as_version, parse
from quiver.stages.core.store import Store


def sources_of(manifest: Manifest) -> dict[str, str]:
    """Return the references of models and inputs, each with its role. A reward model named by a hub
    id or a folder is no version of a store."""
    entries = (*manifest.models, *manifest.inputs)
    return {entry.ref: entry.role for entry in entries if entry.ref != manifest.ref}


def parents_of(manifest: Manifest) -> dict[str, str]:
    """Return the versions of a store that this one was made from, each with its role."""
    return {ref: role for ref, role in sources_of(manifest).items() if as_version(ref)}


def origin_of(manifest: Manifest) -> dict[str, Any]:
    """Return a version as a row of a table: the version, its stage, what it was made of, its rows
    and its content."""
    made_of = []
    for ref, role in parents_of(manifest).items():
        name = ref.removeprefix(f"{manifest.run}/")
        made_of.append(name if f"{role}@" in name else f"{name} ({role})")
    return {
        "version": manifest.ref,
        "stage": manifest.stage,
        "made of": ", ".join(made_of),
        "rows": manifest.rows or None,
        "content": manifest.content_hash[:12],
    }


def lineage(store: Store, ref: str) -> dict[str, Any]:
    """Return `ref` and everything it was made from, down to the sources: {"ref", "stage", "inputs":
    [{"role", "ref", …}]}.

    A version that occurs again is named without its inputs. A version deleted on purpose is marked
    `expired`, one lost otherwise `missing`. The tree is as deep as the line of policies is long.
    """
    root: dict[str, Any] = {"ref": ref}
    seen: set[str] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        try:
            manifest = store.open(node["ref"]).manifest
        except LookupError:
            gone = parse(node["ref"])
            is_expired = isinstance(gone.version, int) and store.has_manifest(gone)
            if not is_expired and node is root:
                raise
            node["expired" if is_expired else "missing"] = True
            if not is_expired:
                continue
            manifest = store.version(gone).manifest
        node |= {"ref": manifest.ref, "stage": manifest.stage, "inputs": []}
        if manifest.ref in seen:
            node["seen"] = True
            continue
        seen.add(manifest.ref)
        node["inputs"] = [
            {"role": role, "ref": ref, "inputs": []} for ref, role in sources_of(manifest).items()
        ]
        # depth first: the last child is taken first, with everything below it
        waiting += [child for child in reversed(node["inputs"]) if as_version(child["ref"])]
    return root
