"""Add up what a run cost, from its manifests. Look here for `quiver cost`.

    cost(store, "arith")["total"]["seconds"]
    cost(store, "arith", by="iteration")["rows"]

Versions whose data were deleted count too, since their manifests stay; so do the prompts, rollouts
and rewards of measurements, in `RUN.eval`. A call that found its version done wrote nothing, so it
is not seen here. Seconds begin with the opening of a version's writer: the start of a process and
its imports do not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from quiver.schemas.errors import printable
from quiver.schemas.refs import KINDS, Ref, as_version
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import read_fields
from quiver.stages.core.threads import map_in_threads

from .lineage import BESIDE_A_POLICY
from .words import aligned, counted, no_run, number, size

_MOSTS = ("devices", "peak_memory", "peak_device_memory")
"""Parts of a version's usage of which a row has the largest; it has the sum of the others."""


_SECONDS = "{:,.1f}".format
_COLUMNS = (
    ("versions", "versions", number),
    ("seconds", "seconds", _SECONDS),
    ("processor s", "processor_seconds", _SECONDS),
    ("device s", "device_seconds", _SECONDS),
    ("devices", "devices", number),
    ("memory", "peak_memory", size),
    ("on device", "peak_device_memory", size),
    ("tokens", "tokens", number),
    ("bytes", "bytes", size),
)
"""Title, key and words of each column of figures."""


def cost(store: Store, run: str, by: str = "stage") -> dict[str, Any]:
    """Return what the versions of a run cost.

    Args:
        by: "stage", "iteration" or "day". An iteration is the number of the policy that was trained
            or measured.

    Returns:
        run, by: the arguments
        rows: for each stage, iteration or day its `name`, the number of `versions`, and in all
            `seconds`, `phases` (seconds by phase), `tokens` and `bytes`; what is recorded
            of `processor_seconds`, `device_seconds`, `unfinished_attempts` in all; and the most of
            `devices`, `peak_memory` and `peak_device_memory` that a version used
        total: the same of all of them
        unmeasured: number of versions from before these were measured
        unreadable: number of versions whose manifest is damaged or missing

    Raises LineageError if the run has no version.
    """
    refs = [
        Ref(name, kind, version)
        for name in (run, f"{run}.eval")
        for kind in KINDS
        for version in store.listing(name, kind).numbers
    ]
    if not refs:
        raise no_run(run, store.runs())
    read = map_in_threads(partial(read_fields, store.storage), refs)
    versions = [fields for fields in read if fields is not None]
    iterations = _iterations(versions) if by == "iteration" else {}
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for fields in versions:
        if by == "iteration":
            name = iterations.get(fields["run_key"], "not trained on")
        elif by == "day":
            name = fields["created"][:10]
        else:
            name = fields["stage"] + (" (held-out)" if fields["run"] != run else "")
        groups[name].append(fields)
    names = list(groups)
    if by != "stage":
        names.sort(key=lambda name: (isinstance(name, str), name))
    return {
        "run": run,
        "by": by,
        "rows": [{"name": name, **_sum(groups[name])} for name in names],
        "total": _sum(versions),
        "unmeasured": sum(not one.get("usage") for one in versions if _is_last(one)),
        "unreadable": len(refs) - len(versions),
    }


def _is_last(fields: Mapping[str, Any]) -> bool:
    """True if a version is the one that records what its work took."""
    return fields["kind"] not in BESIDE_A_POLICY


def _sum(versions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row of `cost`."""
    row: Counter[str] = Counter(versions=len(versions), seconds=0, tokens=0)
    row["bytes"] = sum(sum(fields["bytes"].values()) for fields in versions)
    phases: Counter[str] = Counter()
    for fields in filter(_is_last, versions):
        row["tokens"] += fields["metrics"].get("tokens") or 0
        for phase, seconds in fields["seconds"].items():
            if phase == "total":
                row["seconds"] += seconds
            else:
                phases[phase] += seconds
        usage = {**fields.get("usage", {}), **_devices(fields)}
        for name, amount in usage.items():
            row[name] = max(row[name], amount) if name in _MOSTS else row[name] + amount
    return {**{name: round(amount, 3) for name, amount in row.items()}, "phases": dict(phases)}


def _devices(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return how many devices the processes of a stage held, and for how many device seconds."""
    if fields["environment"].get("device", "cpu") in ("cpu", "server"):
        return {}
    metrics, options = fields["metrics"], fields["config"].get("options") or {}
    devices = metrics.get("devices") or metrics.get("processes")
    devices = devices or options.get("tensor_parallel_size", 1)
    devices *= metrics.get("workers", 1)
    return {"devices": devices, "device_seconds": devices * fields["seconds"]["total"]}


def _iterations(versions: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the iteration of each version that a policy was made of, or a measurement of one, by
    run key; the first such policy decides."""
    labels: dict[str, int] = {}
    by_ref = {f"{one['run']}/{one['kind']}@{one['version']}": one for one in versions}
    ends = [ref for ref, one in by_ref.items() if one["kind"] in ("policy", "evaluations")]
    for end in sorted(ends, key=lambda ref: by_ref[ref]["created"]):
        fields = by_ref[end]
        policies = [one["ref"] for one in fields["models"] if one["role"] == "policy"]
        policy = as_version(end if fields["kind"] == "policy" else "".join(policies))
        waiting = [end] if policy else []
        for ref in waiting:  # grows while it is walked
            if ref in by_ref and by_ref[ref]["run_key"] not in labels:
                labels[by_ref[ref]["run_key"]] = policy.version
                inputs = [one["ref"] for one in by_ref[ref]["inputs"]]
                waiting += [one for one in inputs if "/policy@" not in one]
    return labels


def cost_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the answer of `cost` as a table, with the phases of each stage if it is by stage."""
    table = [(answer["by"], *(title for title, _, _ in _COLUMNS))]
    for row in [*answer["rows"], {"name": "total", **answer["total"]}]:
        cells = [
            in_words(row[key]) if key in row else number(None) for _, key, in_words in _COLUMNS
        ]
        table.append((printable(str(row["name"])), *cells))
        for phase, seconds in row["phases"].items() if answer["by"] == "stage" else ():
            if row["name"] != "total":
                empty = [""] * (len(_COLUMNS) - 2)
                table.append((f"  {printable(phase)}", "", _SECONDS(seconds), *empty))
    lines = aligned(table, right=range(1, len(_COLUMNS) + 1))
    if attempts := answer["total"].get("unfinished_attempts"):
        text = "did not finish before these, and took a time that is not known"
        lines.append(f"{counted(attempts, 'attempt')} {text}")
    if count := answer["unmeasured"]:
        text = "without record of processor time, devices and memory"
        lines.append(f"{counted(count, 'version')} {text}")
    if count := answer["unreadable"]:
        lines.append(f"{counted(count, 'version')} with a damaged or missing manifest, left out")
    return lines
