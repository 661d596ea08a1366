"""What differs between two versions of one kind, for `quiver diff`."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError
from quiver.stages.common.store import Store, Version
from quiver.stages.reward.measures import changes

_KEYS = ("rollout_id", "group_id", "step")
_ALWAYS_DIFFERENT = {
    "version",
    "created",
    "commit_id",
    "content_hash",
    "run_key",
    "seconds",
    "bytes",
    "files",
    "run",
}


def diff(store: Store, first: str, second: str) -> dict[str, Any]:
    """What differs between two versions of one kind.

    `changed`: {path in the manifest: [a, b]}; `rows`: how many stand only in one of them, in both,
    and by column how many differ; for rewards, `rewards`: what became of those of the rows in both
    (`quiver.stages.reward.measures.changes`).
    """
    a = store.open(first)
    b = store.open(second)
    if a.ref.kind != b.ref.kind:
        raise ConfigError(
            f"{a.ref} {b.ref}", "two versions of one kind are compared", next="quiver ls"
        )
    differences = {"changed": _changed(a, b), "rows": {}}
    if a.ref.kind == "policy":
        return differences
    table_a = a.table()
    table_b = b.table()
    key = next(name for name in _KEYS if name in table_a.column_names)
    # the rows that stand in both, in the order of the first
    positions = pc.index_in(table_a[key], value_set=table_b[key].combine_chunks())
    shared_a = table_a.filter(pc.is_valid(positions))
    shared_b = table_b.take(positions.drop_null())
    num_shared = shared_a.num_rows
    changed = {}
    for name in table_a.column_names:
        if name in table_b.column_names and name != key:
            pairs = zip(shared_a[name].to_pylist(), shared_b[name].to_pylist(), strict=True)
            if count := sum(before != after for before, after in pairs):
                changed[name] = count
    differences["rows"] = {
        "only_first": table_a.num_rows - num_shared,
        "only_second": table_b.num_rows - num_shared,
        "both": num_shared,
        "changed": changed,
    }
    if a.ref.kind == "rewards":
        groups = shared_a["group_id"].to_pylist()
        rewards = [table["reward"].to_numpy() for table in (shared_a, shared_b)]
        differences["rewards"] = changes(groups, *rewards)
    return differences


def _changed(a: Version, b: Version) -> dict[str, list[Any]]:
    """What of their manifests differs, by its path."""
    leaves_a, leaves_b = (
        _flatten(version.manifest.model_dump(mode="json", by_alias=True, exclude=_ALWAYS_DIFFERENT))
        for version in (a, b)
    )
    return {
        path: [leaves_a.get(path), leaves_b.get(path)]
        for path in sorted(leaves_a.keys() | leaves_b.keys())
        if leaves_a.get(path) != leaves_b.get(path)
    }


def _flatten(node: Any, path: str = "") -> dict[str, Any]:
    """Leaves by their dotted path; entries of a list that bear a role, by that."""
    is_list = isinstance(node, list) and bool(node)
    if is_list and all(isinstance(entry, dict) and "role" in entry for entry in node):
        node = {entry["role"]: entry for entry in node}
    if not isinstance(node, dict) or not node:
        return {path: node}
    leaves: dict[str, Any] = {}
    for name, child in node.items():
        leaves |= _flatten(child, f"{path}.{name}" if path else name)
    return leaves
