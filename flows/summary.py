"""What `quiver run` prints at its end: the store, the curve, and the next three commands worth trying."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .recipe import Recipe


def summary(recipe: Recipe, path: Path, result: dict[str, Any]) -> list[str]:
    """Lines for a person."""
    lines = ["", f"store   {Path(recipe.store).absolute()}"]
    lines += ["", "iteration  mean reward                policy", *_curve(result["iterations"])]
    measured = [done for done in result["iterations"] if done["evaluation"]]
    if measured:
        lines += ["", "held-out score", f"   before  {_score(result['baseline'])}"]
        lines += [f"after {done['iteration']:>4}  {_score(done['evaluation'])}" for done in measured]
    last = result["iterations"][-1]
    files = f"{path} --store {recipe.store}"
    again = "--set 'reward.functions=[{use=\"length\",arguments={target=4}}]'"
    return [
        *lines,
        "",
        "next",
        "  score the same rollouts with another reward, then optimize on them again, with no generation:",
        f"    quiver reward {files} --rollouts {last['rollouts']} {again}",
        f"    quiver optimize {files} --rollouts {last['rollouts']}",
        "  see what the last policy was made of:",
        f"    quiver lineage {last['policy']} --store {recipe.store}",
        "  go on for two more iterations; what is done is not done again:",
        f"    quiver run {files} --iterations {len(result['iterations']) + 2}",
    ]


def _curve(iterations: list[dict[str, Any]]) -> list[str]:
    means = [done["reward_mean"] for done in iterations]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0

    def bar(mean: float | None) -> str:
        return "(none scored)" if mean is None else f"{mean:6.3f} " + "█" * (1 + round(15 * (mean - low) / span))

    return [f"{done['iteration']:>9}  {bar(mean):<26} {done['policy']}" for done, mean in zip(iterations, means, strict=True)]


def _score(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return "not measured"
    return f"{evaluation['score']:.3f} ± {evaluation['stderr']:.3f} (standard error, n = {evaluation['n']})"
