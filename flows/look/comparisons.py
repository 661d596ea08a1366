"""Tables of what several policies score beside one, and of estimates: lines for a terminal.

They may hold foreign text: the caller must escape control characters before it prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .words import aligned, counted, number, score_of


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


def estimate_lines(answer: Mapping[str, Any], recipe: str) -> list[str]:
    """Return the table of `estimation.estimate`. `recipe`: its file, for the commands named."""
    lines = [
        f"from {used['rollouts']}: {counted(used['rows'], 'row')}, sampled by {used['policy']} "
        f"(score {used['score']:.4f}; gap to the engine {used['gap']:.2g} nats a token)"
        for used in answer["from"]
    ]
    header = ("policy", "estimate", "95 % interval", "effective rows", "KL a row", "mean weight")
    rows = [(*header, "k̂")]
    refused = []
    for each in answer["estimates"]:
        policy = each["policy"]
        if each["estimate"] is not None:
            effective = f"{each['effective_rows']:,.0f} of {each['rows']:,}"
            numbers = [f"{each[name]:.2f}" for name in ("kl", "mean_weight", "pareto_k")]
            interval = interval_of(each["interval"])
            rows.append((policy, f"{each['estimate']:.4f}", interval, effective, *numbers))
        elif each["rows"] is not None:
            command = f"quiver evaluate {recipe} --policy {policy}"
            refused.append(f"{policy}  too far: {each['refused']}; sample instead: `{command}`")
        else:
            refused.append(f"{policy}  left out: {each['refused']}")
    return [*lines, *(aligned(rows) if len(rows) > 1 else []), *refused]
