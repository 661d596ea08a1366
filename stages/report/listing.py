"""List the versions of a store as a table, for `quiver ls` and the first screen of `quiver
view`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from quiver.schemas.errors import CorruptError, printable
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import Ref
from quiver.stages.common.store import Store
from quiver.stages.common.store.index import IndexEntry

from .describe import tags_of
from .gather import metric
from .words import number, score_of, size


class Listed(NamedTuple):
    """A version as text, one cell per column."""

    version: str
    score: str
    """Score of an evaluation, newest score of a policy, or mean reward of rewards; else empty."""
    label: str
    """The version's tags."""
    size: str
    rows: str
    when: str
    """Time of creation, in UTC."""


HEADER = Listed("version", "score or reward", "label", "size", "rows", "when")


def listed(store: Store, entries: Iterable[tuple[Ref, IndexEntry]]) -> list[Listed | str]:
    """Return a row for each version; for a torn version, the reason why it cannot be read."""
    entries = list(entries)
    tags: dict[str, list[str]] = {}
    for run in {ref.run for ref, _ in entries}:
        tags |= tags_of(store, run)
    scores: dict[str, str] = {}
    for ref, entry in entries:
        if ref.kind in ("rewards", "evaluations") and not entry.error:
            try:
                manifest = store.version(ref).manifest
            except (CorruptError, PermissionError):  # `verify` reports it
                continue
            scores |= _scores(manifest)
    return [
        entry.error
        or Listed(
            version=str(ref),
            score=scores.get(str(ref), ""),
            label=" ".join(tags.get(str(ref), [])),
            size=size(entry.bytes),
            rows=f"{entry.rows:,}" if entry.rows else "",
            when=printable(entry.created[:19].replace("T", " ")),
        )
        for ref, entry in entries
    ]


def lines_of(store: Store, entries: Iterable[tuple[Ref, IndexEntry]]) -> list[str]:
    """Return the versions as lines of text under a header."""
    rows = [HEADER, *listed(store, entries)]
    cells = [row for row in rows if isinstance(row, Listed)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # sizes and row counts are right-aligned
    template = "{:<{}}  {:<{}}  {:<{}}  {:>{}}  {:>{}}  {:<{}}"
    lines = []
    for row in rows:
        if isinstance(row, Listed):
            pairs = zip(row, widths, strict=True)
            lines.append(template.format(*chain.from_iterable(pairs)).rstrip())
        else:
            lines.append(row)
    return lines


def _scores(manifest: Manifest) -> dict[str, str]:
    """Return the score of rewards or of an evaluation, by reference of each version it applies
    to."""
    if manifest.kind == "rewards":
        mean = metric(manifest, "reward_mean")
        return {} if mean is None else {manifest.ref: number(mean)}
    policy = manifest.model("policy")
    score = score_of(manifest.metrics)
    return {manifest.ref: score} | ({policy.ref: score} if policy else {})
