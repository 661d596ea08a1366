"""Prefect artifacts of a finished version, one function per stage.

Look here to change the tables and charts on Prefect's pages. Numbers come from the version's
manifest, rows and curves from `flows.look`, and the text from its `pages.md.j2`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from prefect.artifacts import Artifact, MarkdownArtifact, TableArtifact

from quiver.flows.look import samples
from quiver.flows.look.gather import Manifests, metric
from quiver.flows.look.lineage import origin_of
from quiver.flows.look.plots import score_panel, step_panels
from quiver.flows.look.templates import page, quoted
from quiver.flows.look.words import number, rounded
from quiver.schemas.errors import QuiverError
from quiver.stages.core.store import Store, Version

from .text import key, picture, wrapped

_PROMPT_LIMIT = 160
_PROMPT_WIDTH = 40
_STATISTICS = ("mean", "std", "min", "max", "null", "null_rate", "errors", "seconds")
_MOST_FUNCTIONS = 10
_MOST_PAIRS = 6
_CURVES = ("loss", "grad_norm", "approx_kl", "clip_fraction")
_MOST_VERSIONS = 50  # per kind


def rollouts(store: Store, version: Version) -> list[Artifact]:
    """Return a table of ten rollouts, with their number, speed and finish reasons."""
    sampled = samples.evenly(store, version)
    return [
        TableArtifact(
            key=key("rollouts", version.ref.run),
            table=[_answer(row) for row in sampled.rows],
            description=page("rollouts", version.manifest, sampled),
        )
    ]


def rewards(store: Store, version: Version) -> list[Artifact]:
    """Return statistics per reward function, and the rollouts with the highest and lowest
    rewards."""
    manifest = version.manifest
    correlations = (metric(manifest, "correlation") or {}).items()
    strongest = [pair for pair in correlations if pair[1] is not None]
    strongest.sort(key=lambda pair: -abs(pair[1]))
    # One row per function, and a last one for the combined reward.
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
        description=page("rewards", manifest, strongest[:_MOST_PAIRS]),
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
    extremes = TableArtifact(
        key=key("best-and-worst", manifest.run),
        table=rows,
        description=page("best_and_worst", manifest, ranked),
    )
    return [statistics, extremes]


def _answer(row: dict[str, Any]) -> dict[str, str | int]:
    """Return the columns of one rollout, columns with long lines last.

    For an episode, the completion is the last turn's.
    """
    cells = {"tokens": row["tokens"], "finish_reason": row["finish_reason"]}
    if "turns" in row:
        cells |= {"turns": len(row["turns"]), "end_reason": row["end_reason"]}
    prompt = row.get("prompt", row["group_id"])
    return {
        **cells,
        "prompt": wrapped(prompt, _PROMPT_LIMIT, _PROMPT_WIDTH),
        "completion": wrapped(row["completion_text"]),
    }


def policy(store: Store, version: Version) -> list[Artifact]:
    """Return the course of the steps, the audit and the time spent, and a table of the inputs."""
    manifest = version.manifest
    manifests = Manifests(store)
    # One iteration has few steps, often one, so the steps of earlier policies come first.
    line = list(islice(manifests.line(manifest), _MOST_VERSIONS + 1))
    steps = [row for earlier in reversed(line) for row in manifests.steps(earlier)]
    curves = picture(step_panels(steps, _CURVES), "step") if len(steps) > 1 else ""
    return [
        MarkdownArtifact(
            key=key("policy", manifest.run),
            markdown=page("policy", manifest, curves, (*_CURVES, "entropy")),
            description=page("policy_line", manifest),
        ),
        TableArtifact(
            key=key("lineage", manifest.run),
            table=[origin_of(source) for source in reversed(manifests.made_of(manifest))],
            description=f"What **{version.ref}** was made of",
        ),
    ]


def evaluations(store: Store, version: Version) -> list[Artifact]:
    """Return this evaluation beside comparable ones of the same run: the first and the newest,
    oldest first."""
    last = version.manifest
    # A damaged version does not concern the new one; opening it reports the damage.
    manifests = Manifests(store, QuiverError)
    all_refs = manifests.store.refs(last.run, last.kind)
    refs = [str(ref) for ref in all_refs if ref.version < last.version]
    earlier = filter(None, map(manifests.open, [*refs[:1], *refs[1:][-_MOST_VERSIONS:]]))
    shown = [*manifests.comparable(last, earlier), last]
    scores = score_panel((evaluation.version, evaluation.metrics) for evaluation in shown)
    curve = picture([scores], "evaluation") if len(shown) > 1 else ""
    pass_names = [f"pass@{k}" for k in metric(last, "pass@k") or ()]
    return [
        MarkdownArtifact(
            key=key("evaluations", last.run),
            markdown=page("evaluations", shown, curve, pass_names),
            description=page("evaluations_line", shown[0], last),
        )
    ]


VIEWS: dict[str, Callable[[Store, Version], list[Artifact]]] = {
    "generate": rollouts,
    "reward": rewards,
    "optimize": policy,
    "evaluate": evaluations,
}
