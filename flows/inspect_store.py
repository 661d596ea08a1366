"""What the command line says of a store: rows of `show`, the tree of `lineage`, the differences of
`diff`."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, QuiverError
from quiver.schemas.refs import Ref, parse
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


def listing(store: Store, run: str | None) -> list[dict[str, Any]]:
    """What `ls` prints of each version: ref, rows, stage, created; of one whose manifest is torn,
    ref and `error`."""

    def line(ref: Ref) -> dict[str, Any]:
        try:
            manifest = store.open(ref).manifest
        except QuiverError as error:
            return {"ref": str(ref), "error": f"{error.code} {error.object}: {error.message}"}
        return {
            "ref": manifest.ref,
            "rows": manifest.rows,
            "stage": manifest.stage,
            "created": manifest.created,
        }

    return [line(ref) for ref in store.refs(run)]


def history(store: Store, tag: str) -> list[dict[str, Any]]:
    """What became of a tag, given as run/kind@tag, oldest first: at, before, ref, why, key, about.
    ConfigError, LineageError."""
    ref = parse(tag)
    entries = store.history(ref.run, str(ref.version))
    store.resolve(ref)
    return [entry.model_dump(mode="json") for entry in entries]


def rows(version: Version, count: int) -> list[dict[str, Any]]:
    """The first `count` rows as plain values; none for a policy."""
    if version.ref.kind == "policy" or count == 0:
        return []
    return version.table().slice(0, count).to_pylist()


def lineage(store: Store, ref: str, _seen: dict[str, Any] | None = None) -> dict[str, Any]:
    """`ref` and what it was made of, down to the sources: {"ref", "stage", "inputs": [{"role",
    "ref", …}]}.

    A version that was reached before is named without its inputs again; one that is gone is marked
    `expired`.
    """
    seen = {} if _seen is None else _seen
    version = store.open(ref)
    name = str(version.ref)
    if name in seen:
        return {"ref": name, "stage": seen[name], "inputs": [], "seen": True}
    manifest = version.manifest
    seen[name] = manifest.stage
    parents = {
        entry.ref: entry.role for entry in (*manifest.models, *manifest.inputs) if entry.ref != name
    }
    inputs = []
    for parent, role in parents.items():
        try:
            inputs.append({"role": role, **lineage(store, parent, seen)})
        except LookupError:
            inputs.append({"role": role, "ref": parent, "inputs": [], "expired": True})
    return {"ref": name, "stage": manifest.stage, "inputs": inputs}


def diff(store: Store, first: str, second: str) -> dict[str, Any]:
    """What differs between two versions of one kind.

    `changed`: {path in the manifest: [a, b]}; `rows`: how many stand only in one of them, in both,
    and by column how many differ; for rewards, `rewards`: what became of those of the rows in both
    (`quiver.stages.reward.measures.changes`).
    """
    a, b = store.open(first), store.open(second)
    if a.ref.kind != b.ref.kind:
        raise ConfigError(
            f"{a.ref} {b.ref}", "two versions of one kind are compared", next="quiver ls"
        )
    flat = [
        _flatten(v.manifest.model_dump(mode="json", by_alias=True, exclude=_ALWAYS_DIFFERENT))
        for v in (a, b)
    ]
    paths = sorted(
        path for path in flat[0].keys() | flat[1].keys() if flat[0].get(path) != flat[1].get(path)
    )
    changed = {path: [flat[0].get(path), flat[1].get(path)] for path in paths}
    if a.ref.kind == "policy":
        return {"changed": changed, "rows": {}}
    left, right = _shared(a.table(), b.table())
    found = {"changed": changed, "rows": _diff_rows(a.table(), b.table(), left, right)}
    if a.ref.kind == "rewards":
        values = [table["reward"].to_numpy(zero_copy_only=False) for table in (left, right)]
        found["rewards"] = changes(left["group_id"].to_pylist(), *values)
    return found


def _flatten(data: Any, path: str = "") -> dict[str, Any]:
    if (
        isinstance(data, list)
        and data
        and all(isinstance(item, dict) and "role" in item for item in data)
    ):
        data = {item["role"]: item for item in data}
    if not isinstance(data, dict) or not data:
        return {path: data}
    parts = (_flatten(value, f"{path}.{key}" if path else key) for key, value in data.items())
    return {key: value for part in parts for key, value in part.items()}


def _shared(a: pa.Table, b: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The rows that stand in both, in the order of the first, as each has them."""
    key = _key(a)
    positions = pc.index_in(a[key], value_set=b[key].combine_chunks())
    both = pc.is_valid(positions)
    return a.filter(both), b.take(positions.filter(both))


def _key(table: pa.Table) -> str:
    return next(name for name in _KEYS if name in table.column_names)


def _diff_rows(a: pa.Table, b: pa.Table, left: pa.Table, right: pa.Table) -> dict[str, Any]:
    common = [name for name in a.column_names if name in b.column_names and name != _key(a)]
    changed = {name: _count_different(left[name], right[name]) for name in common}
    shared = left.num_rows
    only = {"only_first": a.num_rows - shared, "only_second": b.num_rows - shared, "both": shared}
    return {**only, "changed": {name: count for name, count in changed.items() if count}}


def _count_different(left: pa.ChunkedArray, right: pa.ChunkedArray) -> int:
    if (pa.types.is_primitive(left.type) and left.type == right.type) or pa.types.is_string(
        left.type
    ):
        same = pc.fill_null(pc.equal(left, right), False)
        neither = pc.and_(pc.is_null(left), pc.is_null(right))
        return len(left) - (pc.sum(pc.or_(same, neither)).as_py() or 0)
    return sum(x != y for x, y in zip(left.to_pylist(), right.to_pylist(), strict=True))
