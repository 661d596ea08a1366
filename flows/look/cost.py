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
from collections.abc import Iterable, Mapping
from typing import Any

from quiver.schemas.errors import LineageError, printable
from quiver.schemas.refs import KINDS, Ref, as_version
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import manifest_fields
from quiver.stages.core.threads import map_in_threads

from .lineage import BESIDE_A_POLICY
from .words import aligned, counted, number, size

BY = ("stage", "iteration", "day")
_SUMS = ("processor_seconds", "device_seconds", "unfinished_attempts")
_MOSTS = ("devices", "peak_memory", "peak_device_memory")


def cost(store: Store, run: str, by: str = "stage") -> dict[str, Any]:
    """Return what the versions of a run cost.

    Args:
        by: One of `BY`. An iteration is the number of the policy that was trained or measured.

    Returns:
        run, by: the arguments
        rows: for each stage, iteration or day its `name`, the number of `versions`, and in all
            `seconds`, `phases` (seconds by stage and phase), `tokens` and `bytes`; what is recorded
            of `processor_seconds`, `device_seconds`, `unfinished_attempts` in all; and the most of
            `devices`, `peak_memory` and `peak_device_memory` that a version used
        total: the same of all of them
        unmeasured: number of versions from before these were measured
        unreadable: number of versions whose manifest is damaged

    Raises LineageError if the run has no version.
    """
    refs = [
        Ref(name, kind, version)
        for name in (run, f"{run}.eval")
        for kind in KINDS
        for version in store.listing(name, kind).numbers
    ]
    if not refs:
        raise LineageError(f"run {printable(run)}", "has no versions", next="quiver ls")

    def read(ref: Ref) -> dict[str, Any] | None:
        return manifest_fields(store.storage.read(f"{ref.folder}/manifest.json"))

    manifests = {
        str(ref): fields
        for ref, fields in zip(refs, map_in_threads(read, refs), strict=True)
        if fields is not None
    }
    iterations = _iterations(manifests) if by == "iteration" else {}
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for ref, fields in manifests.items():
        if by == "iteration":
            name = iterations.get(ref, "not trained on")
        elif by == "day":
            name = fields["created"][:10]
        else:
            name = fields["stage"] + (" (held-out)" if fields["run"] != run else "")
        groups[name].append(fields)
    names = list(groups)
    if by != "stage":
        names.sort(key=lambda name: (isinstance(name, str), name))
    makers = [fields for fields in manifests.values() if fields["kind"] not in BESIDE_A_POLICY]
    return {
        "run": run,
        "by": by,
        "rows": [{"name": name, **_sum(groups[name])} for name in names],
        "total": _sum(manifests.values()),
        "unmeasured": sum(not fields.get("usage") for fields in makers),
        "unreadable": len(refs) - len(manifests),
    }


def _sum(versions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row of `cost`."""
    sums: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    mosts: dict[str, float] = {}
    for fields in versions:
        sums["versions"] += 1
        sums["bytes"] += sum(fields["bytes"].values())
        # its time is in the policy's manifest
        if fields["kind"] in BESIDE_A_POLICY:
            continue
        sums["tokens"] += fields["metrics"].get("tokens") or 0
        for phase, seconds in fields["seconds"].items():
            if phase == "total":
                sums["seconds"] += seconds
            else:
                phases[f"{fields['stage']}: {phase}"] += seconds
        usage = fields.get("usage", {})
        sums.update({name: usage[name] for name in _SUMS if name in usage})
        mosts |= {name: max(usage[name], mosts.get(name, 0)) for name in _MOSTS if name in usage}
    row = {name: round(amount, 3) for name, amount in sums.items()}
    return {"seconds": 0, "tokens": 0, **row, **mosts, "phases": dict(phases)}


def _iterations(manifests: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return the iteration of each version that a policy was made of, or a measurement of one; the
    first such policy decides."""
    labels: dict[str, int] = {}
    ends = [ref for ref, one in manifests.items() if one["kind"] in ("policy", "evaluations")]
    for end in sorted(ends, key=lambda ref: manifests[ref]["created"]):
        fields = manifests[end]
        policies = [one["ref"] for one in fields["models"] if one["role"] == "policy"]
        policy = end if fields["kind"] == "policy" else next(iter(policies), "")
        if (measured := as_version(policy)) is None:
            continue
        beside = [fields["metrics"].get(kind) for kind in BESIDE_A_POLICY]
        waiting = [end, *filter(None, beside)]
        for ref in waiting:  # grows while it is walked
            if ref in manifests and ref not in labels:
                labels[ref] = measured.version
                inputs = [one["ref"] for one in manifests[ref]["inputs"]]
                waiting += [one for one in inputs if "/policy@" not in one]
    return labels


def cost_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the answer of `cost` as a table, with the phases of each stage if it is by stage."""
    head = ("versions", "seconds", "processor s", "device s", "devices", "memory", "on device")
    table = [(answer["by"], *head, "tokens", "bytes")]
    for row in [*answer["rows"], {"name": "total", **answer["total"]}]:
        figures = [row.get(name) for name in ("processor_seconds", "device_seconds", "devices")]
        sizes = [row.get(name) for name in ("peak_memory", "peak_device_memory")]
        cells = [f"{row['versions']:,}", number(row["seconds"]), *map(number, figures)]
        cells += [number(None) if amount is None else size(int(amount)) for amount in sizes]
        tokens = number(row["tokens"]) if row["tokens"] else ""
        table.append((printable(str(row["name"])), *cells, tokens, size(row["bytes"])))
        if answer["by"] == "stage" and row["name"] != "total":
            for phase, seconds in row["phases"].items():
                name = f"  {printable(phase.partition(': ')[2])}"
                table.append((name, "", number(seconds), *[""] * 7))
    lines = aligned(table, right=range(1, 10))
    if attempts := answer["total"].get("unfinished_attempts"):
        text = "did not finish before these, and took a time that is not known"
        lines.append(f"{counted(attempts, 'attempt')} {text}")
    for name, words in (
        ("unmeasured", "no processor time, device or memory recorded"),
        ("unreadable", "a damaged manifest, which is left out"),
    ):
        if count := answer[name]:
            verb = "has" if count == 1 else "have"
            lines.append(f"{counted(count, 'version')} {verb} {words}")
    return lines
