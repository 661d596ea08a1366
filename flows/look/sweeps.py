"""The table of a sweep, from manifests alone: scores, and paired differences to the policy that all
cells start from.

    rows = cell_rows(store, record["cells"])        # the best first
    lines = table_lines(rows)

A difference is told apart from 0 if its p-value, corrected for the number of cells by Holm's
method, is at most 0.05. Its interval is not corrected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quiver.schemas.refs import parse
from quiver.stages.core.store import Store
from quiver.stages.evaluate.statistics import CONFIDENCE, holm

from .words import aligned, cell, counted, number, score_of

_UNKNOWN = ("policy", "evaluation", "score", "stderr", "n", "difference", "low", "high", "p_value")
_UNKNOWN += ("verdict", "approx_kl", "clip_fraction", "error")


def cell_rows(store: Store, entries: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell, the highest score first and failed cells last.

    Args:
        entries: By the cell's number: `settings`, and `policy` and `evaluation`, or `error`.
    """
    rows = []
    for cell_number, entry in entries.items():
        row = dict.fromkeys(_UNKNOWN) | {"cell": int(cell_number), **entry}
        if entry.get("evaluation"):
            metrics = store.version(parse(entry["evaluation"])).manifest.metrics
            trained = store.version(parse(entry["policy"])).manifest.metrics
            difference = metrics["difference"]["score"]
            row |= {name: metrics[name] for name in ("score", "stderr", "n")}
            row |= {name: trained.get(name) for name in ("approx_kl", "clip_fraction")}
            row["difference"] = difference["score"]
            if difference["interval"]:
                row["low"], row["high"] = difference["interval"]
                row["p_value"] = difference["p"]
        rows.append(row)
    tested = [row for row in rows if row["p_value"] is not None]
    corrected = holm([row["p_value"] for row in tested])
    for row, p_value in zip(tested, corrected, strict=True):
        row["p_value"] = p_value
        is_apart = p_value <= 1 - CONFIDENCE
        word = "better" if row["difference"] > 0 else "worse"
        row["verdict"] = word if is_apart else "not told apart"
    return sorted(rows, key=lambda row: (row["score"] is None, -(row["score"] or 0), row["cell"]))


def label_of(value: Any) -> str:
    """Return a value of [sweep] as a word: a table's name, else the value itself."""
    return cell(value.get("name", value) if isinstance(value, dict) else value)


def labels_of(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a row in words, by the last part of the key if that is unique."""
    keys = row["settings"]
    ends = Counter(key.rpartition(".")[2] for key in keys)
    return {
        end if ends[end := key.rpartition(".")[2]] == 1 else key: label_of(value)
        for key, value in keys.items()
    }


def table_lines(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[str]:
    """Return the rows as lines below a header. `baseline`: name of the policy compared with."""
    names = list(labels_of(rows[0])) if rows else []
    tested = sum(row["p_value"] is not None for row in rows)
    against = f"against {baseline} (paired, 95 %, Holm over {tested})"
    table = [["cell", *names, "policy", "score", against, "KL", "clipped"]]
    for row in rows:
        labels = labels_of(row).values()
        if row["error"]:
            failed = f"failed: {row['error']['code']} {row['error']['message']}"
            table.append([str(row["cell"]), *labels, failed, *[""] * 4])
            continue
        difference = f"{row['difference']:+.4f}"
        if row["verdict"]:
            difference += f"  {row['low']:+.4f} … {row['high']:+.4f}  {row['verdict']}"
        numbers = [number(row["approx_kl"]), number(row["clip_fraction"])]
        table.append(
            [str(row["cell"]), *labels, row["policy"], score_of(row), difference, *numbers]
        )
    return aligned(table, right=(0,))


def sweep_lines(store: Store, record: Mapping[str, Any]) -> list[str]:
    """Return the whole table of a sweep and what to know about it."""
    rows = cell_rows(store, record["cells"])
    measured = store.version(parse(record["baseline"])).manifest
    start = measured.require_model("policy").ref
    lines = [f"{start}, which all cells start from: score {score_of(measured.metrics)}", ""]
    lines += [*table_lines(rows, start), ""]
    failed = sum(row["error"] is not None for row in rows)
    done = sum(bool(row.get("cached")) for row in rows)
    counts = [f"{len(rows) - failed - done} trained", f"{done} already done"]
    counts += [f"{failed} failed"] if failed else []
    text = f"{counted(len(rows), 'cell')}: {', '.join(counts)}"
    if record["rollouts"]:
        manifests = [store.version(parse(ref)).manifest for ref in record["rollouts"]]
        seconds = len(rows) * sum(manifest.seconds.get("total", 0.0) for manifest in manifests)
        saved = counted(len(rows) * len(manifests), "generation")
        text += f"; {saved} saved ({seconds / 60:.1f} min). This ranks one update"
    text += f". The best of {len(rows)} is biased upwards"
    if record["rollouts"] and not record["then"]:
        text += ": `--then 1` trains the first 2 on fresh rollouts, and measures with fresh samples"
    lines.append(f"{text}.")
    if record["then"]:
        lines += ["", "continued on fresh rollouts, measured with fresh samples:"]
        lines += table_lines(cell_rows(store, record["then"]), start)
    return lines
