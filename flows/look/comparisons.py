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


def bisection_lines(answer: Mapping[str, Any]) -> list[str]:
    """Return the answer of `bisection.bisect`: a row for each comparison, and how sure it is."""
    good = answer["steps"][0]["a"]
    rows = [("policy", "score", "over", "difference", "95 % interval", "p", "")]
    rows.append((good["policy"], score_of(good), *[""] * 5))
    for step in [*answer["steps"], answer["last_step"]]:
        score = step["difference"]["score"]
        rows.append(
            (
                step["policy"],
                score_of(step["b"]),
                step["a"]["policy"],
                f"{score['score']:+.4f}",
                interval_of(score["interval"], "+"),
                f"{score['p']:.2g}",
                "worse" if step["is_worse"] else "not told apart",
            )
        )
    first, before = answer["first"], answer["before"]
    if answer["last_step"]["is_worse"]:
        sure = f"Sure: it is told apart from {before}, the one before it, as well."
    else:
        sure = (
            f"Not sure: it is not told apart from {before}, the one before it. The score may have "
            f"fallen in several steps, or earlier by less than {good['n']} prompts can show."
        )
    risk = (
        f"A policy as good as {good['policy']} passes for worse in 2.5 % of tests; "
        f"{counted(len(answer['steps']), 'test')} decided."
    )
    gone = [f"expired, so not measured: {', '.join(answer['gone'])}"] if answer["gone"] else []
    return [*aligned(rows), f"first worse: {first}", sure, risk, *gone]
