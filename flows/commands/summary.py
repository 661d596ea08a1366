"""What `quiver run` prints at its end: the store, the curve, and the next three commands worth
trying."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from quiver.stages.report.stage import FILE

from ..recipe import Recipe
from .next_step import program, set_options

_BAR = 15


def summary(recipe: Recipe, path: Path, settings: list[str], outcome: dict[str, Any]) -> list[str]:
    """Lines for a person; `outcome` is what `post_train` returned."""
    store = Path(recipe.store).absolute()
    lines = ["", f"store   {store}", f"report  {store / recipe.run / FILE}", ""]
    lines += ["iteration  mean reward                policy", *_curve(outcome["iterations"])]
    measured = [done for done in outcome["iterations"] if done["evaluation"]]
    if measured:
        lines += ["", "held-out score", f"   before  {_score(outcome['baseline'])}"]
        lines += [
            f"after {done['iteration']:>4}  {_score(done['evaluation'])}" for done in measured
        ]
    lines.append("")
    for note, command in next_commands(recipe, path, settings, outcome):
        lines += [note, f"  {command}"]
    return lines


def next_commands(
    recipe: Recipe, path: Path, settings: list[str], outcome: dict[str, Any]
) -> list[tuple[str, str]]:
    """What is worth trying next: (why, a command that a shell takes as it is)."""
    iterations = outcome["iterations"]
    last = iterations[-1]
    quiver = program()
    in_store = ["--store", recipe.store]
    without_store = [each for each in settings if each.partition("=")[0].strip() != "store"]
    same = [str(path), *in_store, *set_options(without_store)]
    by_length = set_options(
        ['reward.functions=[{use="length",arguments={target=4}}]', "evaluate.score=reward"]
    )
    rescored = [*same, *by_length, "--rollouts", last["rollouts"]]
    reward = shlex.join([quiver, "reward", *rescored])
    optimize = shlex.join([quiver, "optimize", *rescored])
    longer = ["--iterations", str(len(iterations) + 2)]
    return [
        (
            "score the same rollouts with another reward, then optimize on them again, with no "
            "generation:",
            f"{reward} && {optimize}",
        ),
        (
            "see what the last policy was made of:",
            shlex.join([quiver, "lineage", last["policy"], *in_store]),
        ),
        (
            "go on for two more iterations; what is done is not done again:",
            shlex.join([quiver, "run", *same, *longer]),
        ),
    ]


def _curve(iterations: list[dict[str, Any]]) -> list[str]:
    means = [done["reward_mean"] for done in iterations if done["reward_mean"] is not None]
    lowest = min(means, default=0.0)
    span = max(means, default=0.0) - lowest or 1.0
    lines = []
    for done in iterations:
        mean = done["reward_mean"]
        bar = "(none scored)"
        if mean is not None:
            bar = f"{mean:6.3f} " + "█" * (1 + round(_BAR * (mean - lowest) / span))
        lines.append(f"{done['iteration']:>9}  {bar:<26} {done['policy']}")
    return lines


def _score(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return "not measured"
    stderr = evaluation["stderr"]
    error = "–" if stderr is None else f"{stderr:.3f}"  # of a single prompt there is none
    return f"{evaluation['score']:.3f} ± {error} (standard error, n = {evaluation['n']})"
