"""The last lines of `quiver run`: the store, the curve, and three commands to try next."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.flows.look import templates
from quiver.flows.look.episodes import in_words
from quiver.flows.look.gather import Manifests
from quiver.flows.recipe import Recipe
from quiver.schemas.errors import QuiverError
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import is_of_sweep

from .next_step import program, set_options

_BAR = 15


def summary(store: str, outcome: dict[str, Any], commands: list[str]) -> list[str]:
    """Return lines for people.

    `outcome`: the result of `post_train`. `commands`: see `next_commands`.
    """
    means = [done["reward_mean"] for done in outcome["iterations"]]
    scored = [mean for mean in means if mean is not None]
    lowest = min([0.0, *scored])
    highest = max([0.0, *scored])
    step = (highest - lowest) / _BAR or 1.0
    bars = []
    for mean in means:
        if mean is None:
            bars.append("(none scored)")
            continue
        # a bar reaches from 0 to the mean; all of them begin at the lowest, at most 0
        blank = round(min(mean, 0.0) / step) - round(lowest / step)
        bars.append(f"{mean:6.3f} {' ' * blank}{'█' * abs(round(mean / step))}")
    text = templates.render(
        "summary.txt.j2",
        **outcome,
        store=store,
        bars=bars,
        scale=f"reward, {lowest:.3f} to {highest:.3f}",
        last=outcome["iterations"][-1],
        episodes=_episodes(store, outcome["iterations"][-1]["rollouts"]),
        commands=commands,
        tag=_tag_for_cell(store, outcome["iterations"][-1]["policy"]),
    )
    return text.splitlines()


def _tag_for_cell(store: str, policy: str) -> str:
    """Return the command that tags `policy` if a sweep made it; else empty text."""
    with suppress(QuiverError):  # as below
        manifest = Manifests(Store(store, create=False)).open(policy)
        if manifest and is_of_sweep(manifest.note):
            words = ["tag", "result", policy, "--store", str(store)]
            return shlex.join([program(), *words])
    return ""


def _episodes(store: str, ref: str) -> list[tuple[str, str]]:
    """Return how the episodes of these rollouts went; empty if they have no turns."""
    with suppress(QuiverError):  # The run is finished, and this is only a look back.
        manifests = Manifests(Store(store, create=False))
        rollouts = manifests.open(ref)
        if numbers := manifests.episodes(rollouts):
            return list(in_words(numbers, rollouts.rows))
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
    without_store = [entry for entry in settings if entry.partition("=")[0].strip() != "store"]
    same = [str(path), *in_store, *set_options(without_store)]
    changes = [f"optimize.learning_rate={recipe.optimize.learning_rate / 2:g}"]
    # The policy that sampled is this many policies before the newest, whose optimizer state stays.
    moments = recipe.retention.moments
    is_state_gone = moments is not None and moments < 2 + recipe.overlap
    fresh = recipe.optimize.without_moments() if is_state_gone else []
    rollouts = ["--rollouts", last["rollouts"]]
    commands = (
        ["optimize", *same, *set_options(changes), *rollouts, *set_options(fresh)],
        ["lineage", last["policy"], *in_store],
        ["run", *same, "--iterations", str(len(iterations) + 2)],
    )
    return [shlex.join([program(), *words]) for words in commands]
