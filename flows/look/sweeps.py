"""The table of a sweep, from manifests alone: scores, and paired differences to the policy that all
cells start from.

    rows = cell_rows(store, record["cells"])        # the best first
    table = table_of(rows, "toy/policy@0")
    lines = sweep_lines(show(store, record))        # the table, and what to know about it
    all_shown = sweeps_of(store, "toy")             # every sweep of a run, newest last

A difference is told apart from 0 if its p-value, corrected for the number of cells by Holm's
method, is at most 0.05. Its interval is not corrected. A cell that was only estimated counts too:
it was left out by answers to the same held-out prompts.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from quiver.schemas.errors import CorruptError, LineageError, from_dict, printable
from quiver.schemas.refs import parse
from quiver.stages.core.store import Store
from quiver.stages.core.store.storage import read_checked
from quiver.stages.evaluate.statistics import CONFIDENCE, holm

from .comparisons import interval_of
from .words import aligned, counted, number, score_of

MOST_OF_ERROR = 40
"""Most characters of a cell's error in the table; below it stands the whole."""
_UNKNOWN = ("policy", "evaluation", "weights", "score", "stderr", "n", "difference", "interval")
_UNKNOWN += ("p", "p_holm", "told_apart", "approx_kl", "clip_fraction", "error", "estimate")
_UNKNOWN += ("cached",)
_COLUMNS = ("part", "cell", "policy", "evaluation", "score", "stderr", "n", "difference", "low")
_COLUMNS += ("high", "p", "p_holm", "told_apart", "approx_kl", "clip_fraction", "error")
_COLUMNS += ("estimate", "estimate_low", "estimate_high", "cached")
"""Columns of CSV, beside the settings."""


def cell_rows(store: Store, entries: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell, the highest score first, then the highest estimate.

    Args:
        entries: By the cell's number: `settings`, and `policy` and `evaluation`, or `error`. An
            `estimate` is what was expected of a policy before anything was measured.
    """
    rows = []
    for cell_number, entry in entries.items():
        row = dict.fromkeys(_UNKNOWN) | {"cell": int(cell_number), **entry}
        if entry.get("evaluation"):
            evaluation = store.version(parse(entry["evaluation"])).manifest
            metrics = evaluation.metrics
            row["weights"] = evaluation.require_model("policy").weights
            trained = store.version(parse(entry["policy"])).manifest.metrics
            difference = metrics["difference"]["score"]
            row |= {name: metrics[name] for name in ("score", "stderr", "n")}
            row |= {name: trained.get(name) for name in ("approx_kl", "clip_fraction")}
            row["difference"] = difference["score"]
            if difference["interval"]:
                row |= {name: difference[name] for name in ("interval", "p")}
        rows.append(row)
    tested = [row for row in rows if row["p"] is not None]
    num_estimated = sum(map(_is_only_estimated, rows))
    corrected = holm([*(row["p"] for row in tested), *[1.0] * num_estimated])
    for row, p_holm in zip(tested, corrected[: len(tested)], strict=True):
        row["p_holm"] = p_holm
        row["told_apart"] = p_holm <= 1 - CONFIDENCE
    return sorted(rows, key=_rank)


def _is_only_estimated(row: Mapping[str, Any]) -> bool:
    return bool(row["estimate"] and not row["evaluation"] and not row["error"])


def _rank(row: Mapping[str, Any]) -> tuple[Any, ...]:
    expected = (row["estimate"] or {}).get("estimate")
    ranks = [(score is None, -(score or 0)) for score in (row["score"], expected)]
    return *ranks, row["cell"]


def label_of(value: Any) -> str:
    """Return a value of [sweep] as a word: a table's name, else the value itself as JSON.

    Settings are not rounded: two that differ in the last digit are two cells.
    """
    word = value.get("name", value) if isinstance(value, dict) else value
    return printable(word if isinstance(word, str) else json.dumps(word, ensure_ascii=False))


def labels_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a row in words, by the last part of the key if that is unique and no
    column of the table."""
    keys = row["settings"]
    ends = Counter([*_COLUMNS, *(key.rpartition(".")[2] for key in keys)])
    return {
        end if ends[end := key.rpartition(".")[2]] == 1 else key: label_of(value)
        for key, value in keys.items()
    }


def table_of(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[list[str]]:
    """Return the rows as cells of text, the header first. `baseline`: name of the policy compared
    with."""
    names = list(labels_of(rows[0])) if rows else []
    tested = sum(row["p"] is not None or _is_only_estimated(row) for row in rows)
    corrected = f", Holm over {tested}" if tested else ""
    against = f"against {baseline} (paired, 95 %{corrected})"
    table = [["cell", *names, "policy", "score", against, "KL", "clipped"]]
    for row in rows:
        labels = labels_of(row).values()
        if row["error"]:
            sentence = row["error"]["message"].partition("\n")[0].partition(". ")[0]
            failed = f"failed: {row['error']['code']} {printable(sentence, MOST_OF_ERROR)}"
            table.append([str(row["cell"]), *labels, failed, *[""] * 4])
            continue
        if row["policy"] is None:
            table.append([str(row["cell"]), *labels, "not trained yet", *[""] * 4])
            continue
        if row["score"] is None:
            table.append([str(row["cell"]), *labels, row["policy"], *_unmeasured(row), "", ""])
            continue
        difference = f"{row['difference']:+.4f}"
        if row["interval"]:
            word = "better" if row["difference"] > 0 else "worse"
            verdict = word if row["told_apart"] else "not told apart"
            difference += f"  {interval_of(row['interval'], '+')}  {verdict}"
        numbers = [number(row["approx_kl"]), number(row["clip_fraction"])]
        table.append(
            [str(row["cell"]), *labels, row["policy"], score_of(row), difference, *numbers]
        )
    return table


def _unmeasured(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return what stands in place of a score and a difference."""
    expected = row["estimate"]
    if not expected or expected["refused"]:
        return "", "not measured"
    interval = interval_of(expected["interval"])
    return f"estimated {expected['estimate']:.4f}, {interval}", "not measured"


def flat_row(part: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as one of CSV. `part`: "cells" or "then"."""
    low, high = row["interval"] or (None, None)
    columns = {**row, "part": part, "low": low, "high": high, "error": _error_of(row)}
    expected = row["estimate"] or {"estimate": None, "interval": None}
    columns["estimate"] = expected["estimate"]
    columns["estimate_low"], columns["estimate_high"] = expected["interval"] or (None, None)
    flat = {"part": part, "cell": row["cell"], **labels_of(row)}
    return flat | {name: columns[name] for name in _COLUMNS}


def _error_of(row: Mapping[str, Any]) -> str | None:
    error = row["error"]
    return error and f"{error['code']} {error['message']}"


def _error_notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return each error in full, with the cells that have it."""
    alike = defaultdict(list)
    for row in rows:
        if row["error"]:
            alike[str(from_dict(row["error"]))].append(row["cell"])
    return [f"{_cells(numbers)} failed: {error}" for error, numbers in alike.items()]


def _equal_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line about each group of cells whose policies have the same weights."""
    alike = defaultdict(list)
    for row in rows:
        if row["weights"]:
            alike[row["weights"]].append(row["cell"])
    return [
        f"{_cells(numbers)} have the same weights: what differs between them changed nothing, and "
        "each still counts in Holm's correction."
        for numbers in alike.values()
        if len(numbers) > 1
    ]


def _cells(numbers: Sequence[int]) -> str:
    """Return `cell 3`, `cells 3, 5`."""
    return f"cell{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


@dataclass(frozen=True)
class Shown:
    """A sweep in words."""

    answer: dict[str, Any]
    """The sweep's record, with the rows of its cells, the best first."""
    begun: str
    """When it was first made, in ISO format."""
    title: str
    """Its name, when it was made, its rollouts and its settings."""
    start: str
    """The policy that all cells start from, and its score, in words."""
    cells: list[list[str]]
    """The table, the header first."""
    notes: list[str]
    continued: str
    """The line above the next table; empty if there is none."""
    then: list[list[str]]
    """The table of the cells that were trained further; empty if none was."""


def show(store: Store, record: Mapping[str, Any]) -> Shown:
    """Return a sweep's tables and what to know about them. Raises LineageError if a manifest is
    gone."""
    rows = cell_rows(store, record["cells"])
    then = cell_rows(store, record["then"])
    measured = store.version(parse(record["baseline"])).manifest
    start = measured.require_model("policy").ref
    continued = ""
    if then:
        again = store.version(parse(record["then_baseline"])).manifest.metrics
        continued = (
            "Continued on fresh rollouts, measured on the same rows with other seeds, by which "
            f"{start} scores {score_of(again)}:"
        )
    notes = [_counts(store, record, rows), *_equal_lines(rows)]
    if unmeasured := sum(map(_is_only_estimated, rows)):
        notes.append(
            f"{counted(unmeasured, 'cell')} only estimated, from {start}'s held-out rollouts: the "
            "interval ends below the best cell's. Without --estimate all are measured."
        )
    begun = record.get("begun", measured.created)
    return Shown(
        {**record, "cells": rows, "then": then},
        begun,
        _title(record, rows, begun),
        f"{start}, which all cells start from: score {score_of(measured.metrics)}",
        table_of(rows, start),
        [*notes, *_error_notes([*rows, *then])],
        continued,
        table_of(then, start) if then else [],
    )


def _title(record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], begun: str) -> str:
    values: dict[str, list[str]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["cell"]):
        for key, label in labels_of(row).items():
            if label not in values[key]:
                values[key].append(label)
    settings = "; ".join(f"{key} {', '.join(labels)}" for key, labels in values.items())
    trained = f"on {', '.join(record['rollouts'])}" if record["rollouts"] else "of whole runs"
    made = f"{datetime.fromisoformat(begun):%Y-%m-%d %H:%M} UTC"
    return f"Sweep {record['sweep']} of {made}, {trained}, over {settings}"


def _counts(store: Store, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many cells were trained, what that saved, and what to type next."""
    failed = sum(row["error"] is not None for row in rows)
    made = [row for row in rows if row["policy"] and not row["error"]]
    done = sum(bool(row["cached"]) for row in made)
    trained = len(made) - done
    waiting = len(rows) - failed - len(made)
    text = f"{counted(len(rows), 'cell')}: {trained} trained, {done} already done"
    if waiting == len(rows):
        text = f"{counted(len(rows), 'cell')}: none is done yet"
    elif waiting:
        text += f", {waiting} not trained yet"
    text += f", {failed} failed" if failed else ""
    if record["rollouts"]:
        manifests = [store.version(parse(ref)).manifest for ref in record["rollouts"]]
        seconds = trained * sum(manifest.seconds.get("total", 0.0) for manifest in manifests)
        saved = counted(trained * len(manifests), "generation")
        text += f"; {saved} saved ({seconds / 60:.1f} min). This ranks one update"
    num_measured = sum(row["score"] is not None for row in rows)
    if num_measured > 1:
        text += f". The best of {num_measured} is biased upwards"
    if num_measured > 1 and record["rollouts"] and not record["then"]:
        text += ": `--then 1` trains the first 2 on fresh rollouts, and measures with other seeds"
    if any(row["score"] is None and not _is_only_estimated(row) for row in rows):
        text += ". `quiver sweep RECIPE` with the same options goes on"
    return f"{text}."


def sweep_lines(shown: Shown) -> list[str]:
    """Return a sweep as lines for a terminal."""
    lines = [shown.title, shown.start, "", *aligned(shown.cells, right=(0,)), "", *shown.notes]
    if shown.continued:
        lines += ["", shown.continued, *aligned(shown.then, right=(0,))]
    return lines


def read(store: Store, run: str, name: str) -> dict[str, Any] | None:
    """Return what is saved of a run's sweep; None if nothing is, or if it is damaged."""
    try:
        return read_checked(store.storage, f"{run}/sweeps/{name}.json")
    except (CorruptError, FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
        return None


def sweeps_of(store: Store, run: str) -> list[Shown]:
    """Return every sweep of a run, the newest last. One that is damaged, or whose manifests are
    gone, is left out."""
    shown = []
    for name in store.storage.list(f"{run}/sweeps"):
        with suppress(LineageError, CorruptError):
            if record := read(store, run, name.removesuffix(".json")):
                shown.append(show(store, record))
    return sorted(shown, key=lambda sweep: sweep.begun)
