"""What a person wants to see of an evaluation: the score with its standard error, before and after,
and all between."""

from __future__ import annotations

from typing import Any

from prefect.artifacts import Artifact, MarkdownArtifact

from quiver.schemas.errors import QuiverError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import Ref
from quiver.stages.common.store import Store, Version
from quiver.stages.report.plots import Panel
from quiver.stages.report.words import measured

from .curves import picture
from .text import key, quoted, table

_MOST = 50


def views(store: Store, version: Version) -> list[Artifact]:
    """One page: this evaluation beside those of the same run that measured the same thing, oldest
    first."""
    ref, last = version.ref, version.manifest
    earlier = [_opened(store, ref._replace(version=each)) for each in _chosen(store, ref)]
    same = [
        found for found in earlier if found and _measured(store, found) == _measured(store, last)
    ]
    shown = [*same, last]
    first = shown[0]
    gain = last.metrics["score"] - first.metrics["score"]
    said = (
        f"{_score(first.metrics)} before ({_policy(first)}), {_score(last.metrics)} after "
        f"({_policy(last)}): {gain:+.4g}"
    )
    if not same:
        said = f"{_score(last.metrics)} ({_policy(last)})"
    panel = Panel(
        "held-out score",
        [(each.version, each.metrics["score"], each.metrics["stderr"] or 0.0) for each in shown],
    )
    ks = list(last.metrics.get("pass@k", {}))
    columns = [
        "evaluation",
        "policy",
        "score ± standard error",
        "prompts",
        "not scored",
        *(f"pass@{k}" for k in ks),
    ]
    rows = [_row(each, ks) for each in shown]
    note = (
        f"The score is {quoted(str(last.config.get('score')))}; each evaluation has the same "
        "prompts."
    )
    blocks = [picture([panel], "evaluation") if same else "", table(columns, rows), note]
    markdown = "\n\n".join(filter(None, blocks))
    return [MarkdownArtifact(key=key("evaluations", ref.run), markdown=markdown, description=said)]


def _chosen(store: Store, ref: Ref) -> list[int]:
    """The first and the newest of the earlier ones."""
    numbers = [each for each in store.numbers(ref.run, ref.kind) if each < ref.version]
    return numbers[:1] + numbers[1:][-_MOST:]


def _opened(store: Store, ref: Ref | str) -> Manifest | None:
    try:
        return store.open(ref).manifest
    except QuiverError:  # of no concern to the new one; whoever opens it is told
        return None


def _measured(store: Store, manifest: Manifest) -> Any:
    """What two evaluations must share to be compared: the score, and the prompts."""
    rollouts = _opened(store, manifest.input("rollouts").ref)
    prompts = rollouts.input("prompts") if rollouts else None
    return manifest.config, prompts.content_hash if prompts else manifest.ref


def _policy(manifest: Manifest) -> str:
    model = manifest.model("policy")
    return model.ref if model else "no policy"


def _score(metrics: dict[str, Any]) -> str:
    return f"**{measured(metrics['score'], metrics['stderr'])}**"


def _row(manifest: Manifest, ks: list[str]) -> list[Any]:
    numbers = manifest.metrics
    passes = [numbers["pass@k"].get(k, {}).get("score") for k in ks]
    score = measured(numbers["score"], numbers["stderr"])
    return [
        f"{manifest.kind}@{manifest.version}",
        _policy(manifest),
        score,
        numbers["n"],
        numbers.get("null"),
        *passes,
    ]
