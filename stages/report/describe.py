"""Describe a version in lines of text for a terminal: kind, size, inputs, metrics and first rows.
Look here to change what `quiver show` prints.

    describe(store, store.open("arith/rewards@3"), rows=10)     # lines of text

All of it may be foreign text: the caller must escape control characters before it prints.
"""

from __future__ import annotations

import textwrap
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from quiver.schemas.errors import CorruptError, LineageError, printable, quoted_name
from quiver.schemas.manifest import Manifest
from quiver.schemas.metrics import score_numbers
from quiver.stages.common.store import Store, Version

from .episodes import Part, in_words, numbers_of, parts_of, turns_and_end
from .gather import STEP_COLUMNS, Manifests
from .joined import open_joined, told_of_prompt
from .shards import Shards
from .thumbnails import lines_of
from .words import counted, number, size, unscored_of

WIDTH = 100
_INDENT = 12
MOST_LINES = 12
"""Lines shown of one text."""
MOST_TURNS = 20
"""Turns shown of one episode."""
OBSERVED = "│ "
"""Prefix of each line of an observation, to show that it is not trained on."""
_LONGEST_NAME = 40
Z = 1.96
"""Half the width of a normal 95 % interval, in standard errors."""


def describe(store: Store, version: Version, rows: int) -> list[str]:
    """Return lines for a person, with up to `rows` rows. Raises CorruptError, LineageError."""
    manifest = version.manifest
    episodes = numbers_of(version)
    lines = [*_about(store, version), *_numbers(manifest, episodes or ())]
    lines += _episodes(episodes, manifest.rows)
    if manifest.kind == "policy":
        return [*lines, *_steps(store, manifest, rows)]
    if not rows:
        return lines
    if manifest.kind in ("updates", "prompts"):
        first_rows = Shards(version).at(range(min(rows, manifest.rows)))
        if manifest.kind == "updates":
            return [*lines, "", *_table(first_rows, ["step", *STEP_COLUMNS])]
        for index, row in enumerate(first_rows):
            title = f"{index + 1} of {manifest.rows:,}: {row['group_id']}"
            lines += ["", title, *row_lines(told_of_prompt(row))]
        return lines
    try:
        joined = open_joined(store, version.ref)
    except LineageError as error:
        first_rows = Shards(version).at(range(min(rows, manifest.rows)))
        plain = [printable(row, 2000) for row in first_rows]
        return [*lines, "", f"its rollouts are not there: {error.message}", *plain]
    lines += ["", *_piece("rows of", ", ".join(joined.sources))]
    for row in joined.rows(range(min(rows, len(joined)))):
        title = f"{row['position'] + 1} of {len(joined):,}: {row['rollout_id']}"
        lines += ["", title, *row_lines(row)]
    return lines


def row_lines(
    row: Mapping[str, Any], width: int = WIDTH, most_lines: int = MOST_LINES
) -> list[str]:
    """Return a row of `Joined.rows` as lines of `width` characters. Each field follows its name,
    wrapped, and cut after `most_lines`."""
    lines = asked_lines(row, width, most_lines)
    if "turns" in row:
        for part in parts_of(row, MOST_TURNS):
            lines += part_lines(part, width, most_lines)
    else:
        lines += _piece("completion", row.get("completion_text"), width, most_lines)
    return lines + outcome_lines(row, width, most_lines)


def asked_lines(row: Mapping[str, Any], width: int, most_lines: int) -> list[str]:
    """Return the lines before the completion: the prompt and the other columns of its source
    row."""
    piece = partial(_piece, width=width, most_lines=most_lines)
    lines = []
    reference = row.get("reference")
    others = {
        name: cell
        for name, cell in (row.get("columns") or {}).items()
        if cell not in (row.get("prompt"), reference)
    }
    lines += piece("prompt", row.get("prompt"))
    for line in lines_of(row.get("images") or ()):
        lines += piece("picture", line)
    lines += piece("reference", reference)
    return lines + piece("columns", _named_cells(others, in_words=False))


def part_lines(part: Part, width: int, most_lines: int) -> list[str]:
    """Return a part of a turn as lines; lines of an observation start with `OBSERVED`."""
    mark = OBSERVED if part.voice == "observation" else ""
    return _piece(part.name, part.text, width, most_lines, mark)


def outcome_lines(row: Mapping[str, Any], width: int, most_lines: int) -> list[str]:
    """Return the lines after the completion: how it ended, its reward, errors and advantage."""
    piece = partial(_piece, width=width, most_lines=most_lines)
    lines = piece("ended by", ending(row))
    lines += piece("score", _cell(row["score"]) if "score" in row else None)
    if "reward" in row:
        lines += piece("reward", _cell(row["reward"]))
        lines += piece("parts", _named_cells(row.get("parts") or {}, in_words=False))
    for name, message in (row.get("errors") or {}).items():
        lines += piece("error", f"{name}: {message}" if message is not None else None)
    if "kept" in row:
        advantage = f"{_cell(row['advantage'])}, mean ratio {_cell(row['mean_ratio'])}"
        lines += piece("advantage", advantage if row["kept"] else f"dropped: {row['drop_reason']}")
    return lines


def ending(row: Mapping[str, Any]) -> str | None:
    """Return why a rollout ended and how many tokens it has."""
    if "finish_reason" not in row:
        return None
    if "turns" in row:
        return f"{turns_and_end(row)} and {counted(row['tokens'], 'token')}"
    return f"{row['finish_reason']}, after {counted(row['tokens'], 'token')}"


def score_line(metrics: Mapping[str, Any]) -> str:
    """Return the score of an evaluation or of a difference, with its 95 % interval."""
    score, stderr = metrics["score"], metrics["stderr"]
    prompts = counted(metrics["n"], "prompt")
    if stderr is None:
        return f"{number(score)} over {prompts}"
    low, high = score - Z * stderr, score + Z * stderr
    return (
        f"{score:.4f} ± {stderr:.4f} (standard error), 95 % interval {low:.4f} … {high:.4f}, "
        f"over {prompts}"
    )


def tags_of(store: Store, run: str) -> dict[str, list[str]]:
    """Return the tags of a run by the reference that they hold. Damaged or unreadable tags are
    skipped; `verify` reports them."""
    tags: dict[str, list[str]] = {}
    with suppress(CorruptError, PermissionError):
        for name in store.tag_names(run):
            with suppress(CorruptError, PermissionError):
                tags.setdefault(store.tagged(run, name) or "", []).append(name)
    return tags


def _about(store: Store, version: Version) -> Iterator[str]:
    """Yield kind, size, date, tags, inputs and status."""
    manifest = version.manifest
    tags = tags_of(store, manifest.run).get(manifest.ref, [])
    rows = f", {counted(manifest.rows, 'row')}" if manifest.rows else ""
    num_bytes = sum(entry.bytes for entry in manifest.files)
    yield f"{manifest.ref}{rows}, {size(num_bytes)} in {counted(len(manifest.files), 'file')}"
    made_on = manifest.created[:19].replace("T", " ")
    seconds = f", {number(manifest.seconds['total'])} s" if "total" in manifest.seconds else ""
    yield from _piece("made by", f"{manifest.stage}, {made_on}{seconds}")
    yield from _piece("tags", ", ".join(tags))
    sources = {entry.ref: entry.role for entry in (*manifest.models, *manifest.inputs)}
    yield from _piece("made of", ", ".join(f"{role} {ref}" for ref, role in sources.items()))
    if "algorithm" in manifest.config:
        yield from _piece("algorithm", manifest.config["algorithm"])
    status = [f"{count:,} {name.replace('_', ' ')}" for name, count in manifest.status.items()]
    yield from _piece("status", ", ".join(status))


def _numbers(manifest: Manifest, others: Container[str] = ()) -> Iterator[str]:
    """Yield the manifest's metrics: plain ones together, each nested group on a line of its own.
    Metrics in `others` are shown elsewhere and left out."""
    metrics = {name: cell for name, cell in manifest.metrics.items() if name not in others}
    if manifest.kind == "evaluations":
        yield from _piece("score", score_line(metrics) + unscored_of(metrics))
        estimates = {f"pass@{k}": each for k, each in (metrics.pop("pass@k", None) or {}).items()}
        difference = metrics.pop("difference", None)
        if difference:
            estimates["difference"] = difference["score"]
        for name, estimate in estimates.items():
            yield from _piece(name, score_line(estimate))
        for name in (*score_numbers(metrics), "baseline"):
            metrics.pop(name, None)
    plain = {name: cell for name, cell in metrics.items() if not isinstance(cell, dict | list)}
    yield from _piece("numbers", _named_cells(plain))
    for name, group in metrics.items():
        if not isinstance(group, dict):
            continue
        nested = {key: each for key, each in group.items() if isinstance(each, dict)}
        yield from _piece(
            name.replace("_", " "),
            _named_cells({key: each for key, each in group.items() if key not in nested}),
        )
        for key, inner in nested.items():
            cells = {each: cell for each, cell in inner.items() if not isinstance(cell, dict)}
            yield from _piece(f"{key}", _named_cells(cells))


def _episodes(numbers: Mapping[str, Any] | None, num_rows: int) -> Iterator[str]:
    """Yield the counts of episodes of rollouts/2."""
    for name, text in in_words(numbers, num_rows) if numbers else ():
        yield from _piece(name, text)


def _steps(store: Store, policy: Manifest, rows: int) -> list[str]:
    """Return a table of the last optimizer steps that made a policy."""
    steps = Manifests(store).steps(policy)
    if not steps or not rows:
        return []
    shown = steps[-rows:]
    title = f"the last {len(shown)} of {counted(len(steps), 'step')}:"
    return ["", title, *_table(shown, ["step", *STEP_COLUMNS])]


def _table(rows: list[dict[str, Any]], columns: list[str]) -> list[str]:
    lines = ["".join(f"{name:>14}" for name in columns)]
    return lines + ["".join(f"{_cell(row[name]):>14}" for name in columns) for row in rows]


def _named_cells(cells: Mapping[str, Any], *, in_words: bool = True) -> str:
    """Return `mean 0.25 · std 0.125`, without empty lists.

    Args:
        in_words: If true, underscores in names become spaces. False for names from a recipe, such
            as columns, which are quoted instead.
    """
    return " · ".join(
        f"{str(name).replace('_', ' ') if in_words else quoted_name(name)} {_cell(cell)}"
        for name, cell in cells.items()
        if cell not in ([], {})
    )


def _cell(content: Any) -> str:
    if isinstance(content, bool):
        return "yes" if content else "no"
    if isinstance(content, int | float):
        return number(content + 0)  # no −0
    if content is None:
        return number(None)
    return printable(content)


def _piece(
    name: str, text: Any, width: int = WIDTH, most_lines: int = MOST_LINES, mark: str = ""
) -> list[str]:
    """Return `name`, then the lines of `text` beside it, each after `mark`. Empty if no text."""
    if text is None or text == "":
        return []
    width = max(width - _INDENT - 2 - len(mark), 20)
    lines = []
    for line in str(text).split("\n")[: most_lines + 1]:
        escaped = printable(line, width * most_lines)
        lines += textwrap.wrap(escaped, width) or [""]
    if len(lines) > most_lines:
        lines = [*lines[: most_lines - 1], "…"]
    lines = [mark + line for line in lines]
    title = printable(name, _LONGEST_NAME)
    if len(title) >= _INDENT:
        return [f"  {title}", *(f"  {'':<{_INDENT}}{line}" for line in lines)]
    return [f"  {title if index == 0 else '':<{_INDENT}}{line}" for index, line in enumerate(lines)]
