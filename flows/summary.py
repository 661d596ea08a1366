"""What `quiver run` prints at its end: the store, the curve, and the next three commands worth
trying."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from quiver.stages.report.stage import FILE

from .next_step import program
from .recipe import Recipe


def summary(recipe: Recipe, path: Path, settings: list[str], result: dict[str, Any]) -> list[str]:
    """Lines for a person."""
    store = Path(recipe.store).absolute()
    lines = ["", f"store   {store}", f"report  {store / recipe.run / FILE}"]
    lines += ["", "iteration  mean reward                policy", *_curve(result["iterations"])]
    measured = [done for done in result["iterations"] if done["evaluation"]]
    if measured:
        lines += ["", "held-out score", f"   before  {_score(result['baseline'])}"]
        lines += [
            f"after {done['iteration']:>4}  {_score(done['evaluation'])}" for done in measured
        ]
    return [
        *lines,
        "",
        *(
            line
            for note, command in next_commands(recipe, path, settings, result)
            for line in (note, f"  {command}")
        ),
    ]


def next_commands(
    recipe: Recipe, path: Path, settings: list[str], result: dict[str, Any]
) -> list[tuple[str, str]]:
    """What is worth trying next: (why, a command that a shell takes as it is)."""
    last, quiver = result["iterations"][-1], program()
    others = [setting for setting in settings if setting.partition("=")[0].strip() != "store"]
    same = ["--store", recipe.store, *(part for setting in others for part in ("--set", setting))]
    length = [
        "--set",
        'reward.functions=[{use="length",arguments={target=4}}]',
        "--set",
        "evaluate.score=reward",
    ]
    rescored = shlex.join([str(path), *same, *length, "--rollouts", last["rollouts"]])
    more = shlex.join(
        [quiver, "run", str(path), *same, "--iterations", str(len(result["iterations"]) + 2)]
    )
    return [
        ("score the same rollouts with another reward, then optimize on them again, with no "
         "generation:",
         f"{shlex.quote(quiver)} reward {rescored} && {shlex.quote(quiver)} optimize {rescored}"),
        ("see what the last policy was made of:", shlex.join([quiver, "lineage", last["policy"], "--store", recipe.store])),
        ("go on for two more iterations; what is done is not done again:", more),
    ]  # fmt: skip


def _curve(iterations: list[dict[str, Any]]) -> list[str]:
    means = [done["reward_mean"] for done in iterations]
    known = [mean for mean in means if mean is not None]
    low, span = min(known, default=0.0), (max(known, default=0.0) - min(known, default=0.0)) or 1.0

    def bar(mean: float | None) -> str:
        return (
            "(none scored)"
            if mean is None
            else f"{mean:6.3f} " + "█" * (1 + round(15 * (mean - low) / span))
        )

    return [
        f"{done['iteration']:>9}  {bar(mean):<26} {done['policy']}"
        for done, mean in zip(iterations, means, strict=True)
    ]


def _score(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return "not measured"
    return (
        f"{evaluation['score']:.3f} ± {evaluation['stderr']:.3f} (standard error, n = "
        f"{evaluation['n']})"
    )
