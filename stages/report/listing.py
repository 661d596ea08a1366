"""The versions of a store as a table: what `quiver ls` prints, and where `quiver view` begins."""

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
    """A version in words, a cell a column."""

    version: str
    score: str
    """Of an evaluation, or of a policy by its newest one; of rewards the mean; else empty."""
    label: str
    """Its tags."""
    size: str
    rows: str
    when: str
    """Of its making, in UTC."""


HEADER = Listed("version", "score or reward", "label", "size", "rows", "when")


def listed(store: Store, entries: Iterable[tuple[Ref, IndexEntry]]) -> list[Listed | str]:
    """A row for each version; of a torn one why it cannot be read."""
    entries = list(entries)
    tags: dict[str, list[str]] = {}
    for run in {ref.run for ref, _ in entries}:
        tags |= tags_of(store, run)
    scores: dict[str, str] = {}
    for ref, entry in entries:
        if ref.kind in ("rewards", "evaluations") and not entry.error:
            try:
                manifest = store.version(ref).manifest
            except (CorruptError, PermissionError):  # `verify` tells of it
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
    """The same as lines of text under a header."""
    rows = [HEADER, *listed(store, entries)]
    cells = [row for row in rows if isinstance(row, Listed)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # sizes and numbers of rows stand at the right of their column
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
    """What rewards or an evaluation say, by the references of which they say it."""
    if manifest.kind == "rewards":
        mean = metric(manifest, "reward_mean")
        return {} if mean is None else {manifest.ref: number(mean)}
    policy = manifest.model("policy")
    score = score_of(manifest.metrics)
    return {manifest.ref: score} | ({policy.ref: score} if policy else {})
