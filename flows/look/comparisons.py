"""Tables of what several policies score beside one, and of estimates: lines for a terminal.

They may hold foreign text: the caller must escape control characters before it prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .words import aligned, number, score_of


def interval_of(interval: Sequence[float] | None, sign: str = "") -> str:
    """Return `0.0554 … 0.0720`; with the sign "+", `+0.0035 … -0.0010`."""
    return f"{{:{sign}.4f}} … {{:{sign}.4f}}".format(*interval) if interval else number(None)


def comparison_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the table of `compare_each`: one row for each policy beside the first."""
    comparisons = answer["comparisons"]
    first = comparisons[0]["a"]
    holm = f"p (Holm over {len(comparisons)})"
    rows = [("policy", "evaluation", "score", f"over {first['policy']}", "95 % interval", holm, "")]
    rows.append((first["policy"], first["ref"], score_of(first), "", "", "", ""))
    notes = []
    for compared in comparisons:
        after, score = compared["b"], compared["difference"]["score"]
        rows.append(
            (
                after["policy"],
                after["ref"],
                score_of(after),
                f"{score['score']:+.4f} over {score['n']} prompts",
                interval_of(score["interval"], "+"),
                f"{score['p_holm']:.2g}",
                "told apart" if score["told_apart"] else "not told apart",
            )
        )
        notes += [f"note on {after['ref']}: {note}" for note in compared["notes"]]
        if compared["a"]["ref"] != first["ref"]:
            notes.append(f"note on {after['ref']}: compared with {compared['a']['ref']}")
    best = "The best of several is biased upwards: measure it again on fresh rows."
    return [*aligned(rows), *notes, best]
