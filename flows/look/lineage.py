"""Trace a version back to its sources: its parents, their parents, and so on. Look here for
`quiver lineage`."""

from __future__ import annotations

from typing import Any

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import as_version
from quiver.stages.core.store import Store
from quiver.stages.core.store.readable import open_kept


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
        "note": manifest.note,
    }


def lineage(store: Store, ref: str) -> dict[str, Any]:
    """Return `ref` and everything it was made from, down to the sources: {"ref", "stage", "inputs":
    [{"role", "ref", …}]}.

    A version that occurs again is marked `seen`, and named without its inputs. Other marks:

        expired, removed    when and why; only its manifest is kept
        missing             there is no such version
        replaced            another version has its number now, with other content
        error               its manifest is torn

    The tree is as deep as the line of policies is long. Raises LineageError or CorruptError about
    `ref` itself.
    """
    root: dict[str, Any] = {"ref": ref}
    seen: set[str] = set()
    waiting = [(root, None)]
    while waiting:
        node, content_hash = waiting.pop()
        try:
            version, gone = open_kept(store, node["ref"])
        except (LookupError, CorruptError) as error:
            if node is root:
                raise
            is_torn = isinstance(error, CorruptError)
            node |= {"error": str(error).partition("\n")[0]} if is_torn else {"missing": True}
            continue
        manifest = version.manifest
        node |= {"ref": manifest.ref, "stage": manifest.stage, "inputs": [], **gone}
        if content_hash not in (None, manifest.content_hash):
            node["replaced"] = True
            continue
        if manifest.ref in seen:
            node["seen"] = True
            continue
        seen.add(manifest.ref)
        hashes = {entry.ref: entry.content_hash for entry in manifest.inputs}
        for source, role in sources_of(manifest).items():
            node["inputs"].append({"role": role, "ref": source, "inputs": []})
        # depth first: the last child is taken first, with everything below it
        waiting += [
            (child, hashes.get(child["ref"]))
            for child in reversed(node["inputs"])
            if as_version(child["ref"])
        ]
    return root
