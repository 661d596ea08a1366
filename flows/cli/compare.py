"""Differences between two versions for `quiver diff`."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.flows.look.paired import match_rows
from quiver.schemas.errors import ConfigError
from quiver.schemas.plain import flatten, without_nulls
from quiver.stages.core.store import Store
from quiver.stages.reward.measures import changes

_KEYS = ("rollout_id", "group_id", "step")
_ALWAYS_DIFFERENT = {
    "version",
    "created",
    "commit_id",
    "content_hash",
    "run_key",
    "seconds",
    "usage",
    "bytes",
    "files",
    "run",
}


def diff(store: Store, first: str, second: str) -> dict[str, Any]:
    """Return the differences between two versions of one kind.

    Rows are paired by their ids. Versions without a common id, for example rollouts of two
    policies, are paired by prompt and sample.

    Returns:
        A dict with `changed`: {path in the manifest: [a, b]}, and `rows`: counts of rows only in
            one of them and in both, and by column how many differ. For rewards, `rewards` says how
            the rewards of common rows changed (`quiver.stages.reward.measures.changes`).

    Raises:
        ConfigError: If the versions are of different kinds.
    """
    a = store.open(first)
    b = store.open(second)
    if a.ref.kind != b.ref.kind:
        raise ConfigError(
            f"{a.ref} {b.ref}", "expected two versions of the same kind", next="quiver ls"
        )
    leaves_a, leaves_b = (
        flatten(version.manifest.model_dump(mode="json", by_alias=True, exclude=_ALWAYS_DIFFERENT))
        for version in (a, b)
    )
    manifest_changes = {
        path: [leaves_a.get(path), leaves_b.get(path)]
        for path in sorted(leaves_a.keys() | leaves_b.keys())
        if leaves_a.get(path) != leaves_b.get(path)
    }
    differences = {"changed": manifest_changes, "rows": {}}
    if a.ref.kind == "policy":
        return differences
    table_a = a.table()
    table_b = b.table()
    key = next(name for name in _KEYS if name in table_a.column_names)
    positions, key = match_rows(store, a, b, table_a, table_b, key)
    shared_a = table_a.filter(pc.is_valid(positions))
    shared_b = table_b.take(positions.drop_null())
    num_shared = shared_a.num_rows
    changed = {}
    for name in table_a.column_names:
        if name in table_b.column_names and name not in (key, "rollout_id"):
            pairs = zip(shared_a[name].to_pylist(), shared_b[name].to_pylist(), strict=True)
            cell_type = shared_a[name].type
            if pa.types.is_list(cell_type):
                cell_type = cell_type.value_type
            if pa.types.is_struct(cell_type):  # A null field means nothing.
                pairs = ([without_nulls(cell or {}) for cell in pair] for pair in pairs)
            if count := sum(not _are_equal(before, after) for before, after in pairs):
                changed[name] = count
    differences["rows"] = {
        "only_first": table_a.num_rows - num_shared,
        "only_second": table_b.num_rows - num_shared,
        "both": num_shared,
        "paired_by": key,
        "changed": changed,
    }
    if a.ref.kind == "rewards":
        groups = shared_a["group_id"].to_pylist()
        rewards = [table["reward"].to_numpy() for table in (shared_a, shared_b)]
        differences["rewards"] = changes(groups, *rewards)
    return differences


def _are_equal(before: Any, after: Any) -> bool:
    """Return True if two cells are equal. NaN, which a user's column may hold, equals itself."""
    if before == after or (before != before and after != after):  # noqa: PLR0124
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        names = before.keys()
        return names == after.keys() and all(_are_equal(before[key], after[key]) for key in names)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(map(_are_equal, before, after))
    return False
