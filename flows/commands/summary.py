"""The last lines of `quiver run`: the store, the curve, and three commands to try next."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import QuiverError
from quiver.stages.common.store import Store
from quiver.stages.report import episodes, templates
from quiver.stages.report.stage import FILE

from ..recipe import Recipe
from .next_step import program, set_options

_BAR = 15


def summary(recipe: Recipe, path: Path, settings: list[str], outcome: dict[str, Any]) -> list[str]:
    """Return lines for people; `outcome` is the result of `post_train`."""
    store = Path(recipe.store).absolute()
    means = [done["reward_mean"] for done in outcome["iterations"]]
    scored = [mean for mean in means if mean is not None]
    lowest = min([0.0, *scored])
    highest = max([0.0, *scored])
    step = (highest - lowest) / _BAR or 1.0
    bars = [
        "(none scored)" if mean is None else f"{mean:6.3f} {_bar(mean / step, lowest / step)}"
        for mean in means
    ]
    text = templates.render(
        "summary.txt.j2",
        **outcome,
        store=store,
        report=store / recipe.run / FILE,
        bars=bars,
        scale=f"reward, {lowest:.3f} to {highest:.3f}",
        last=outcome["iterations"][-1],
        episodes=_episodes(store, outcome["iterations"][-1]["rollouts"]),
        commands=next_commands(recipe, path, settings, outcome),
    )
    return text.splitlines()


def _bar(length: float, left: float) -> str:
    """Return a bar from 0 to `length`; bars begin at `left`, which is at most 0."""
    blank = round(min(length, 0.0)) - round(left)
    return " " * blank + "█" * abs(round(length))


def _episodes(store: Path, ref: str) -> list[tuple[str, str]]:
    """Return how the episodes of these rollouts went; empty if they have no turns."""
    with suppress(QuiverError):  # The run is finished, and this is only a look back.
        rollouts = Store(store, create=False).open(ref)
        numbers = episodes.numbers_of(rollouts, episodes.FEW_BYTES)
        return list(episodes.in_words(numbers, rollouts.manifest.rows)) if numbers else []
    return []


def next_commands(
    recipe: Recipe, path: Path, settings: list[str], outcome: dict[str, Any]
) -> list[str]:
    """Return commands to try next: train with another learning rate, show the lineage, go further.

    The first one uses the same rollouts. All of them fit any task.
    """
    iterations = outcome["iterations"]
    last = iterations[-1]
    in_store = ["--store", recipe.store]
    without_store = [each for each in settings if each.partition("=")[0].strip() != "store"]
    same = [str(path), *in_store, *set_options(without_store)]
    slower = set_options([f"optimize.learning_rate={recipe.optimize.learning_rate / 2:g}"])
    # The policy that sampled is this many policies before the newest, whose optimizer state stays.
    moments = recipe.retention.moments
    is_state_gone = moments is not None and moments < 2 + recipe.overlap
    fresh = set_options(["optimize.load_optimizer=false"]) if is_state_gone else []
    longer = ["--iterations", str(len(iterations) + 2)]
    optimize, lineage, run = (
        shlex.join([program(), *words])
        for words in (
            ["optimize", *same, *slower, "--rollouts", last["rollouts"], *fresh],
            ["lineage", last["policy"], *in_store],
            ["run", *same, *longer],
        )
    )
    return [optimize, lineage, run]
