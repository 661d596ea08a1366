"""What a person wants to see of a new policy: the audit, how the steps went, where the time went,
what it was made of."""

from __future__ import annotations

from typing import Any

from prefect.artifacts import Artifact, MarkdownArtifact, TableArtifact

from quiver.flows.assets import parents_of
from quiver.schemas.errors import LineageError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import parse
from quiver.stages.common.store import Store, Version
from quiver.stages.report import samples
from quiver.stages.report.plots import Panel
from quiver.stages.report.words import counted, number, size

from .curves import picture
from .text import key, quoted, table

_CURVES = ("loss", "grad_norm", "approx_kl", "clip_fraction")
_AUDIT = {
    "mean_gap": "mean of |trainer − engine| over tokens, in nats",
    "max_gap": "the largest of them",
    "kl_k3": "estimate of KL(engine ‖ trainer), nats a token",
    "outside_clip": "share of tokens outside the clip range before the first step",
    "effective_sample_size": "share of the rollouts",
    "tokens": "compared",
}
_MOST_POLICIES, _MOST_VERSIONS = 50, 50


def views(store: Store, version: Version) -> list[Artifact]:
    """The optimizer's page, and a table of what the policy was made of."""
    return [_page(store, version), _lineage(store, version)]


def _page(store: Store, version: Version) -> MarkdownArtifact:
    manifest, numbers = version.manifest, version.manifest.metrics
    steps = _steps(store, manifest)
    panels = [Panel(name, [(row["step"], row[name], 0.0) for row in steps]) for name in _CURVES]
    skipped = f" ({numbers['skipped_steps']} left out)" if numbers.get("skipped_steps") else ""
    speed = (
        f", {number(numbers['tokens_per_second'])} tokens/s"
        if numbers.get("tokens_per_second")
        else ""
    )
    what = (
        f"{quoted(str(manifest.config.get('algorithm')))}, "
        f"{counted(numbers['steps'], 'step')}{skipped}"
    )
    phases = sorted(
        ((name, value) for name, value in manifest.seconds.items() if name != "total"),
        key=lambda row: -row[1],
    )
    blocks = [
        picture(panels, "step") if len(steps) > 1 else "",
        table(["last step", ""], [[name, numbers.get(name)] for name in (*_CURVES, "entropy")]),
        "## Audit before the first step",
        _audit(numbers.get("audit")),
        "## Seconds and bytes",
        table(
            ["phase", "seconds"], [*map(list, phases), ["**total**", manifest.seconds.get("total")]]
        ),
        f"{size(manifest.bytes['data'])} in {counted(len(manifest.files), 'file')}.",
    ]
    return MarkdownArtifact(
        key=key("policy", version.ref.run),
        markdown="\n\n".join(filter(None, blocks)),
        description=f"**{version.ref}**: {what}, {number(numbers['tokens'])} tokens{speed}; "
        f"rollouts: {_counts(numbers)}",
    )


def _steps(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    """The steps of this policy and of those before it, oldest first: an iteration alone has few,
    often one."""
    steps, found = _own_steps(store, manifest), manifest
    for _ in range(_MOST_POLICIES):
        try:
            found = store.open(found.input("policy").ref).manifest
            if found.stage != "optimize":
                break
            steps = _own_steps(store, found) + steps
        except LineageError:  # the earlier ones are gone, which is no matter of this one's
            break
    return steps


def _own_steps(store: Store, manifest: Manifest) -> list[dict[str, Any]]:
    return samples.head(store.open(manifest.metrics["updates"]), ["step", *_CURVES]).to_pylist()


def _counts(numbers: dict[str, Any]) -> str:
    dropped = (numbers.get("dropped") or {}).items()
    found = [
        f"{number(count)} dropped ({reason.replace('_', ' ')})"
        for reason, count in dropped
        if count
    ]
    return ", ".join([f"{number(numbers.get('kept'))} kept", *found])


def _audit(audit: dict[str, Any] | None) -> str:
    if not audit:
        return "Not made: `optimize.audit.enabled = false`, or there was nothing to train on."
    return table(
        ["", "", "meaning"], [[name, audit.get(name), meaning] for name, meaning in _AUDIT.items()]
    )


def _lineage(store: Store, version: Version) -> TableArtifact:
    """One row a version, from the new policy down to the prompts; earlier policies are named, and
    not followed."""
    rows, waiting, seen = [], [str(version.ref)], set()
    while waiting and len(rows) < _MOST_VERSIONS:
        ref = waiting.pop(0)
        if ref in seen:
            continue
        seen.add(ref)
        try:
            manifest = store.open(ref).manifest
        except LineageError:
            rows.append(
                {"version": ref, "stage": "(gone)", "made of": "", "rows": None, "content": ""}
            )
            continue
        parents = parents_of(manifest)
        named = {parent.removeprefix(f"{manifest.run}/"): role for parent, role in parents.items()}
        made = ", ".join(
            short if f"{role}@" in short else f"{short} ({role})" for short, role in named.items()
        )
        content = manifest.content_hash[:8]
        rows.append(
            {
                "version": ref,
                "stage": manifest.stage,
                "made of": made,
                "rows": manifest.rows or None,
                "content": content,
            }
        )
        waiting += [parent for parent in parents if parse(parent).kind != "policy"]
    return TableArtifact(
        key=key("lineage", version.ref.run),
        table=rows,
        description=f"What **{version.ref}** was made of",
    )
