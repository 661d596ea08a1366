"""What a person wants to see of a finished version, as Prefect's artifacts: one function a stage.

Numbers come from the version's manifest, rows and curves from what `stages.report` gathers; here
they are put into words, tables and markdown.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from prefect.artifacts import Artifact, MarkdownArtifact, TableArtifact

from quiver.schemas.errors import QuiverError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import parse
from quiver.stages.common.store import Store, Version
from quiver.stages.report import samples
from quiver.stages.report.gather import Manifests, metric
from quiver.stages.report.lineage import parents_of
from quiver.stages.report.plots import score_panel, step_panels
from quiver.stages.report.words import counted, number, rounded, score_of, size

from .text import blocks, key, picture, quoted, table, wrapped

_PROMPT_LIMIT = 160
_PROMPT_WIDTH = 40
_STATISTICS = ("mean", "std", "min", "max", "null", "null_rate", "errors", "seconds")
_MOST_FUNCTIONS = 10
_MOST_PAIRS = 6
_CURVES = ("loss", "grad_norm", "approx_kl", "clip_fraction")
_AUDIT = {
    "mean_gap": "mean of |trainer − engine| over tokens, in nats",
    "max_gap": "the largest of them",
    "kl_k3": "estimate of KL(engine ‖ trainer), nats a token",
    "outside_clip": "share of tokens outside the clip range before the first step",
    "effective_sample_size": "share of the rollouts",
    "tokens": "compared",
}
_MOST_VERSIONS = 50  # of one kind, or in one table


def rollouts(store: Store, version: Version) -> list[Artifact]:
    """How many, how fast, how they ended, and ten of them."""
    manifest = version.manifest
    sampled = samples.evenly(store, version)
    description = (
        f"**{version.ref}**: {number(manifest.rows)} rollouts, "
        f"{number(metric(manifest, 'tokens'))} tokens, "
        f"{number(metric(manifest, 'tokens_per_second'))} tokens/s, "
        f"{size(manifest.bytes['data'])}; ended by {_counts(manifest) or 'nothing'}. "
        f"{len(sampled.rows)} samples{sampled.among(manifest.rows)}:"
    )
    rows = [_answer(sample) for sample in sampled.rows]
    return [TableArtifact(key=key("rollouts", manifest.run), table=rows, description=description)]


def rewards(store: Store, version: Version) -> list[Artifact]:
    """Statistics function by function, and which rollouts were worth most and least."""
    manifest = version.manifest
    correlations = metric(manifest, "correlation") or {}
    pairs = [pair for pair in correlations if correlations[pair] is not None]
    pairs.sort(key=lambda pair: -abs(correlations[pair]))
    strongest = (
        f"; correlation {quoted(pair)} {correlations[pair]:.2f}" for pair in pairs[:_MOST_PAIRS]
    )
    # one row a function, and a last one for the reward that they make together
    described = {
        quoted(name): statistics for name, statistics in manifest.metrics["functions"].items()
    }
    described["reward"] = {column: metric(manifest, f"reward_{column}") for column in _STATISTICS}
    statistics = TableArtifact(
        key=key("rewards", manifest.run),
        table=[
            {"function": name, **{column: rounded(row.get(column)) for column in _STATISTICS}}
            for name, row in described.items()
        ],
        description=f"**{version.ref}**, {number(manifest.rows)} rollouts: "
        f"{_counts(manifest)}{''.join(strongest)}",
    )
    ranked = samples.best_and_worst(store, version)
    rows = []
    for sample in ranked.rows:
        row = {"reward": rounded(sample["reward"])}
        if len(sample["parts"]) > 1:
            by_function = islice(sample["parts"].items(), _MOST_FUNCTIONS)
            row["parts"] = "\n".join(
                f"{quoted(name)} {number(score)}" for name, score in by_function
            )
        rows.append(row | _answer(sample))
    half = samples.ROWS // 2
    chosen = "all" if len(rows) == ranked.candidates else f"the {half} best and the {half} worst of"
    extremes = TableArtifact(
        key=key("best-and-worst", manifest.run),
        table=rows,
        description=f"**{version.ref}** by reward: {chosen} {number(ranked.candidates)} rollouts "
        f"with a reward{ranked.among(manifest.rows)}",
    )
    return [statistics, extremes]


def _counts(manifest: Manifest) -> str:
    """Rows by what became of them."""
    counts = manifest.status.items()
    return ", ".join(f"{name.replace('_', ' ')} {number(count)}" for name, count in counts)


def _answer(sample: dict[str, Any]) -> dict[str, str | int]:
    """The columns that say what one rollout is, those of long lines last."""
    return {
        "tokens": len(sample["completion_ids"]),
        "finish_reason": sample["finish_reason"],
        "prompt": wrapped(sample["prompt"], _PROMPT_LIMIT, _PROMPT_WIDTH),
        "completion": wrapped(sample["completion_text"]),
    }


def policy(store: Store, version: Version) -> list[Artifact]:
    """How the steps went, the audit, where the time went; and a table of what it was made of."""
    manifest = version.manifest
    metrics = manifest.metrics
    manifests = Manifests(store)
    # an iteration alone has few steps, often one: those of the policies before it come first
    line = list(islice(manifests.line(manifest), _MOST_VERSIONS + 1))
    steps = [row for earlier in reversed(line) for row in manifests.steps(earlier)]
    audit = "Not made: `optimize.audit.enabled = false`, or there was nothing to train on."
    if metrics.get("audit"):
        rows = [[name, metrics["audit"].get(name), meaning] for name, meaning in _AUDIT.items()]
        audit = table(["", "", "meaning"], rows)
    phases = [[name, seconds] for name, seconds in manifest.seconds.items() if name != "total"]
    phases.sort(key=lambda phase: -phase[1])
    total = ["**total**", manifest.seconds.get("total")]
    markdown = blocks(
        picture(step_panels(steps, _CURVES), "step") if len(steps) > 1 else "",
        table(["last step", ""], [[name, metrics.get(name)] for name in (*_CURVES, "entropy")]),
        "## Audit before the first step",
        audit,
        "## Seconds and bytes",
        table(["phase", "seconds"], [*phases, total]),
        f"{size(manifest.bytes['data'])} in {counted(len(manifest.files), 'file')}.",
    )
    description = (
        f"**{version.ref}**: {quoted(str(manifest.config.get('algorithm')))}, "
        f"{counted(metrics['steps'], 'step')}"
    )
    if metrics.get("skipped_steps"):
        description += f" ({metrics['skipped_steps']} left out)"
    description += f", {number(metrics['tokens'])} tokens"
    if metrics.get("tokens_per_second"):
        description += f", {number(metrics['tokens_per_second'])} tokens/s"
    description += f"; rollouts: {number(metrics.get('kept'))} kept"
    for reason, count in (metrics.get("dropped") or {}).items():
        if count:
            description += f", {number(count)} dropped ({reason.replace('_', ' ')})"
    return [
        MarkdownArtifact(
            key=key("policy", manifest.run), markdown=markdown, description=description
        ),
        TableArtifact(
            key=key("lineage", manifest.run),
            table=_lineage(manifests, manifest),
            description=f"What **{version.ref}** was made of",
        ),
    ]


def _lineage(manifests: Manifests, newest: Manifest) -> list[dict[str, Any]]:
    """One row a version, from the new policy down to the prompts; earlier policies are named, and
    not followed."""
    rows: list[dict[str, Any]] = []
    waiting = [newest.ref]
    seen = set(waiting)
    while waiting and len(rows) < _MOST_VERSIONS:
        ref = waiting.pop(0)
        manifest = manifests.open(ref)
        row = {"version": ref, "stage": "(gone)", "made of": "", "rows": None, "content": ""}
        rows.append(row)
        if manifest is None:
            continue
        parents = parents_of(manifest)
        made_of = []
        for parent, role in parents.items():
            name = parent.removeprefix(f"{manifest.run}/")
            made_of.append(name if f"{role}@" in name else f"{name} ({role})")
            if parse(parent).kind != "policy" and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
        row["stage"] = manifest.stage
        row["made of"] = ", ".join(made_of)
        row["rows"] = manifest.rows or None
        row["content"] = manifest.content_hash[:8]
    return rows


def evaluations(store: Store, version: Version) -> list[Artifact]:
    """This evaluation beside those of the same run that measured the same thing, oldest first: the
    first and the newest of them."""
    last = version.manifest
    refs = [str(ref) for ref in store.refs(last.run, last.kind) if ref.version < last.version]
    # one that is torn is of no concern to the new one; whoever opens it is told
    manifests = Manifests(store, QuiverError)
    earlier = filter(None, map(manifests.open, [*refs[:1], *refs[1:][-_MOST_VERSIONS:]]))
    shown = [*manifests.comparable(last, earlier), last]
    first = shown[0]
    description = f"**{score_of(last.metrics)}** ({_measured_policy(last)})"
    curve = ""
    if first is not last:
        gain = last.metrics["score"] - first.metrics["score"]
        description = (
            f"**{score_of(first.metrics)}** before ({_measured_policy(first)}), "
            f"**{score_of(last.metrics)}** after ({_measured_policy(last)}): {gain:+.4g}"
        )
        scores = score_panel((evaluation.version, evaluation.metrics) for evaluation in shown)
        curve = picture([scores], "evaluation")
    ks = list(metric(last, "pass@k") or {})
    columns = ["evaluation", "policy", "score ± standard error", "prompts", "not scored"]
    rows = [
        [
            f"{each.kind}@{each.version}",
            _measured_policy(each),
            score_of(each.metrics),
            each.metrics["n"],
            each.metrics.get("null"),
            *(metric(each, "pass@k", k, "score") for k in ks),
        ]
        for each in shown
    ]
    markdown = blocks(
        curve,
        table([*columns, *(f"pass@{k}" for k in ks)], rows),
        f"The score is {quoted(str(last.config.get('score')))}; each evaluation has the same "
        "prompts.",
    )
    return [
        MarkdownArtifact(
            key=key("evaluations", last.run), markdown=markdown, description=description
        )
    ]


def _measured_policy(evaluation: Manifest) -> str:
    model = evaluation.model("policy")
    return model.ref if model else "no policy"


VIEWS: dict[str, Callable[[Store, Version], list[Artifact]]] = {
    "generate": rollouts,
    "reward": rewards,
    "optimize": policy,
    "evaluate": evaluations,
}
