"""Differences between two versions for `quiver diff`, and the choice of evaluations to compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.schemas.plain import flatten
from quiver.schemas.refs import check_name, parse
from quiver.stages.common.store import Store, Version
from quiver.stages.evaluate.comparison import pair_prompts, prompts_of
from quiver.stages.report.words import number
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
            f"{a.ref} {b.ref}", "two versions of one kind are compared", next="quiver ls"
        )
    differences = {"changed": _changed(a, b), "rows": {}}
    if a.ref.kind == "policy":
        return differences
    table_a = a.table()
    table_b = b.table()
    key = next(name for name in _KEYS if name in table_a.column_names)
    keys_a = table_a[key].combine_chunks()
    keys_b = table_b[key].combine_chunks()
    # Rows in both, in the order of the first.
    positions = pc.index_in(keys_a, value_set=keys_b)
    has_groups = key == "rollout_id" and "group_id" in table_a.column_names
    if has_groups and positions.null_count == len(positions):
        with suppress(LineageError):  # Without their prompts, no two rows can be matched.
            names_a, names_b = pair_prompts(store, a, b)
            samples_b = _samples(table_b, names_b)
            positions = pc.index_in(_samples(table_a, names_a), value_set=samples_b)
            key = "prompt"
    shared_a = table_a.filter(pc.is_valid(positions))
    shared_b = table_b.take(positions.drop_null())
    num_shared = shared_a.num_rows
    changed = {}
    for name in table_a.column_names:
        if name in table_b.column_names and name not in (key, "rollout_id"):
            pairs = zip(shared_a[name].to_pylist(), shared_b[name].to_pylist(), strict=True)
            if pa.types.is_struct(shared_a[name].type):  # A null field means nothing.
                pairs = (
                    [{k: v for k, v in (cell or {}).items() if v is not None} for cell in pair]
                    for pair in pairs
                )
            if count := sum(before != after for before, after in pairs):
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


def lines_of(differences: dict[str, Any]) -> list[str]:
    """Return the differences as lines for people."""
    lines = [
        f"{printable(path)}: {printable(before)} → {printable(after)}"
        for path, (before, after) in differences["changed"].items()
    ]
    if rows := differences["rows"]:
        lines.append(
            f"rows, paired by {rows['paired_by']}: {rows['both']:,} in both, "
            f"{rows['only_first']:,} only in the first, {rows['only_second']:,} only in the second"
        )
        lines += [f"  {printable(name)}: {n:,} differ" for name, n in rows["changed"].items()]
    if rewards := differences.get("rewards"):
        lines += [
            f"  {rewards['null_to_value']:,} have a reward only in the second, "
            f"{rewards['value_to_null']:,} only in the first",
            f"  {rewards['order']:,} change places within their group, "
            f"{rewards['sign']:,} their sign",
            f"  the mean changes by {number(rewards['mean_difference'])}; correlation "
            f"{number(rewards['correlation'])}",
        ]
    return lines


def _samples(table: pa.Table, names: Mapping[str, str]) -> pa.Array:
    """Return each row's prompt name and sample index. Shape: [rows]."""
    groups = table["group_id"].to_pylist()
    if "sample_index" in table.column_names:
        indices = table["sample_index"].to_pylist()
    else:  # Rewards are in the order of their rollouts.
        seen: Counter[str] = Counter()
        indices = []
        for group in groups:
            indices.append(seen[group])
            seen[group] += 1
    return pa.array(
        [f"{names[group]} {index}" for group, index in zip(groups, indices, strict=True)]
    )


def find_evaluations(store: Store, first: str, second: str) -> tuple[Version, Version]:
    """Return the evaluations that two names refer to: each itself, a policy's, or a run's newest.

    A policy with several evaluations is compared by its newest one on prompts that the other was
    also measured on; without one, by its newest. Raises LineageError if a name has no evaluation.
    """
    named = [list(_newest_first(store, name)) for name in (first, second)]
    for pair in product(*named):
        with suppress(LineageError):  # The prompts were deleted.
            prompts_a, prompts_b = (prompts_of(store, version).manifest for version in pair)
            are_two = pair[0].ref != pair[1].ref
            if are_two and prompts_a.content_hash == prompts_b.content_hash:
                return pair
    return named[0][0], named[1][0]


def _newest_first(store: Store, name: str) -> Iterator[Version]:
    """Yield the evaluations that `name` refers to, at least one. Raises LineageError if there is
    none."""
    if "/" not in name:
        if numbers := store.numbers(check_name(name, "run"), "evaluations"):
            yield store.open(f"{name}/evaluations@{numbers[-1]}")
            return
        raise LineageError(f"run {name}", "has no evaluation yet", next="quiver evaluate RECIPE")
    ref = parse(name)
    if ref.kind == "evaluations":
        yield store.open(ref)
        return
    if ref.kind != "policy":
        raise ConfigError(
            str(ref),
            "expected a version of evaluations or policy, or a run",
            next=f"quiver ls {ref.run}",
        )
    policy = store.resolve(ref)
    evaluations = [
        version
        for version in store.versions(kind="evaluations")
        if (model := version.manifest.model("policy")) and model.ref == str(policy)
    ]
    if not evaluations:
        raise LineageError(
            str(policy),
            "has no evaluation yet",
            next=f"quiver evaluate RECIPE --policy {policy}",
        )
    yield from sorted(evaluations, key=lambda each: each.manifest.created, reverse=True)


def _changed(a: Version, b: Version) -> dict[str, list[Any]]:
    """Return the manifest entries that differ, by path."""
    leaves_a, leaves_b = (
        flatten(version.manifest.model_dump(mode="json", by_alias=True, exclude=_ALWAYS_DIFFERENT))
        for version in (a, b)
    )
    return {
        path: [leaves_a.get(path), leaves_b.get(path)]
        for path in sorted(leaves_a.keys() | leaves_b.keys())
        if leaves_a.get(path) != leaves_b.get(path)
    }
