"""Describe versions in lines of text for a terminal. Look here to change what `quiver show` and
`quiver ls` print.

    describe(store, store.open("arith/rewards@3"), rows=10)     # lines of text

All of it may be foreign text: the caller must escape control characters before it prints.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from quiver.schemas.errors import LineageError, printable
from quiver.schemas.manifest import Manifest
from quiver.schemas.metrics import problem, score_numbers
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.listing import Summary, is_of_sweep, read_fields
from quiver.stages.core.threads import map_in_threads

from .comparisons import interval_of
from .episodes import Piece, in_words, numbers_of, pieces_of
from .gather import STEP_COLUMNS, Manifests, read_tags
from .joined import open_joined, prompt_fields
from .lineage import sources_of
from .shards import Shards
from .words import aligned, cell, counted, number, score_of, size, unscored_of

WIDTH = 100
_INDENT = 12
MOST_LINES = 12
"""Lines shown of one text."""
MOST_TURNS = 20
"""Turns shown of one episode."""
OBSERVED = "│ "
"""Prefix of each line of an observation, to show that it is not trained on."""
_LONGEST_NAME = 40


# -- one version


def describe(store: Store, version: Version, rows: int) -> list[str]:
    """Return lines for a person, with up to `rows` rows. Raises CorruptError, LineageError."""
    manifest = version.manifest
    episodes = numbers_of(version)
    num_bytes = sum(entry.bytes for entry in manifest.files)
    num_rows = f", {counted(manifest.rows, 'row')}" if manifest.rows else ""
    lines = [
        f"{manifest.ref}{num_rows}, {size(num_bytes)} in {counted(len(manifest.files), 'file')}"
    ]
    fields = [*_origin(store, manifest), *_numbers(manifest, episodes or {})]
    fields += in_words(episodes, manifest.rows) if episodes else ()
    for name, text in fields:
        lines += wrapped(name, text)
    if manifest.kind == "policy":
        steps = Manifests(store).steps(manifest)
        if steps and rows:
            title = f"the last {min(rows, len(steps))} of {counted(len(steps), 'step')}:"
            lines += ["", title, *_step_lines(steps[-rows:])]
        return lines
    if not rows:
        return lines
    shown = range(min(rows, manifest.rows))
    if manifest.kind == "updates":
        return [*lines, "", *_step_lines(Shards(version).at(shown))]
    if manifest.kind == "prompts":
        joined_rows = [
            {"name": row["group_id"]} | prompt_fields(row) for row in Shards(version).at(shown)
        ]
    else:
        try:
            joined = open_joined(store, version.ref)
        except LineageError as error:
            plain = [printable(row, 2000) for row in Shards(version).at(shown)]
            return [*lines, "", f"its rollouts are missing: {error.message}", *plain]
        lines += ["", *wrapped("rows of", ", ".join(joined.sources))]
        joined_rows = [
            row | {"name": row["rollout_id"]} for row in joined.rows(range(min(rows, len(joined))))
        ]
    for index, row in enumerate(joined_rows):
        lines += ["", f"{index + 1} of {manifest.rows:,}: {row['name']}"]
        for piece in pieces_of(row, MOST_TURNS):
            lines += piece_lines(piece)
    return lines


def piece_lines(piece: Piece, width: int = WIDTH, most_lines: int = MOST_LINES) -> list[str]:
    """Return a piece of a row as lines; lines of an observation start with `OBSERVED`."""
    mark = OBSERVED if piece.voice == "observation" else ""
    return wrapped(piece.name, piece.text, width, most_lines, mark)


def wrapped(
    name: str, text: Any, width: int = WIDTH, most_lines: int = MOST_LINES, mark: str = ""
) -> list[str]:
    """Return `name`, then the lines of `text` beside it, each after `mark`, wrapped to `width` and
    cut after `most_lines`. Empty if no text."""
    if text is None or text == "":
        return []
    width = max(width - _INDENT - 2 - len(mark), 20)
    lines = []
    for line in str(text).split("\n")[: most_lines + 1]:
        lines += textwrap.wrap(printable(line, width * most_lines), width) or [""]
    if len(lines) > most_lines:
        lines = [*lines[: most_lines - 1], "…"]
    title = printable(name, _LONGEST_NAME)
    if len(title) >= _INDENT:
        return [f"  {title}", *(f"  {'':<{_INDENT}}{mark}{line}" for line in lines)]
    titles = [title, *[""] * (len(lines) - 1)]
    return [f"  {title:<{_INDENT}}{mark}{line}" for title, line in zip(titles, lines, strict=True)]


def score_line(metrics: Mapping[str, Any]) -> str:
    """Return the score of an evaluation or of a difference, with its 95 % interval."""
    prompts = counted(metrics["n"], "prompt")
    score, stderr = metrics["score"], metrics["stderr"]
    if stderr is None:
        return f"{number(score)} over {prompts}"
    text = f"{score:.4f} ± {stderr:.4f} (standard error)"
    if interval := metrics.get("interval"):
        text += f", 95 % interval {interval_of(interval)}"
    return f"{text}, over {prompts}"


def tags_of(store: Store, run: str) -> dict[str, list[str]]:
    """Return the tags of a run by the reference that they hold."""
    tags: dict[str, list[str]] = defaultdict(list)
    for name, ref in read_tags(store, run, store.tagged).items():
        tags[ref].append(name)
    return tags


def _origin(store: Store, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield date, tags, inputs and status."""
    created = manifest.created[:19].replace("T", " ")
    seconds = f", {number(manifest.seconds['total'])} s" if "total" in manifest.seconds else ""
    yield "made by", f"{manifest.stage}, {created}{seconds}"
    yield "note", printable(manifest.note, 1000)
    yield "tags", ", ".join(tags_of(store, manifest.run).get(manifest.ref, []))
    yield "made of", ", ".join(f"{role} {ref}" for ref, role in sources_of(manifest).items())
    yield "algorithm", manifest.config.get("algorithm", "")
    status = [f"{count:,} {name.replace('_', ' ')}" for name, count in manifest.status.items()]
    yield "status", ", ".join(status)


def _numbers(manifest: Manifest, shown_elsewhere: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the manifest's metrics: plain ones together, each nested group on a line of its own."""
    metrics = {k: entry for k, entry in manifest.metrics.items() if k not in shown_elsewhere}
    if manifest.kind == "evaluations":
        yield "score", score_line(metrics) + unscored_of(metrics)
        for k, estimate in (metrics.pop("pass@k", None) or {}).items():
            yield f"pass@{k}", score_line(estimate)
        if difference := metrics.pop("difference", None):
            yield "difference", score_line(difference["score"])
        for name in (*score_numbers(metrics), "baseline"):
            metrics.pop(name, None)
    groups = [
        ("numbers", {k: entry for k, entry in metrics.items() if not isinstance(entry, list)})
    ]
    for name, group in groups:
        cells = [
            f"{str(key).replace('_', ' ')} {cell(entry)}"
            for key, entry in group.items()
            if entry != [] and not isinstance(entry, dict)
        ]
        yield name, " · ".join(cells)
        groups += [
            (str(key).replace("_", " "), entry)
            for key, entry in group.items()
            if isinstance(entry, dict)
        ]


def _step_lines(steps: list[dict[str, Any]]) -> list[str]:
    names = ["step", *STEP_COLUMNS]
    rows = [names, *([cell(step[name]) for name in names] for step in steps)]
    return aligned(rows, right=range(len(names)))


# -- all versions


class Listed(NamedTuple):
    """A version as text, one cell per column."""

    version: str
    score: str = ""
    """Score of an evaluation, newest score of a policy, or mean reward of rewards; else empty.
    What a sweep measured counts as older than anything else."""
    tags: str = ""
    size: str = ""
    rows: str = ""
    when: str = ""
    """Time of creation, in UTC."""
    note: str = ""
    """The whole note. It comes last, so that a long one moves no other column."""


HEADER = Listed("version", "score or reward", "tags", "size", "rows", "when", "note")


def listed(store: Store, entries: Iterable[tuple[Ref, Summary]]) -> list[Listed]:
    """Return a row for each version; of a torn version only the reason why it cannot be read."""
    entries = list(entries)
    tags: dict[str, list[str]] = {}
    for run in {ref.run for ref, _ in entries}:
        tags |= tags_of(store, run)
    scored = [
        (ref, entry)
        for ref, entry in entries
        if ref.kind in ("rewards", "evaluations") and not entry.error
    ]
    scored.sort(key=lambda one: (not is_of_sweep(one[1].note), one[1].created))  # a later one wins
    scores: dict[str, str] = {}
    manifests = map_in_threads(partial(read_fields, store.storage), [ref for ref, _ in scored])
    for (ref, entry), fields in zip(scored, manifests, strict=True):
        metrics = fields.get("metrics") if isinstance(fields, dict) else None
        if problem(ref.kind, metrics):  # `verify` reports it
            continue
        if ref.kind == "evaluations":
            policies = [source for source, role in entry.sources.items() if role == "policy"]
            scores.update(dict.fromkeys([str(ref), *policies], score_of(metrics)))
        elif metrics.get("reward_mean") is not None:
            scores[str(ref)] = number(metrics["reward_mean"])
    return [
        Listed(entry.error)
        if entry.error
        else Listed(
            version=str(ref),
            score=scores.get(str(ref), ""),
            tags=" ".join(tags.get(str(ref), [])),
            size=size(entry.bytes),
            rows=f"{entry.rows:,}" if entry.rows else "",
            when=printable(entry.created[:19].replace("T", " ")),
            note=printable(entry.note),
        )
        for ref, entry in entries
    ]
