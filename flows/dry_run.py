"""A rehearsal of a recipe in a minute: the same stages, rows and rewards with a small random model.

Look here for `quiver run --dry-run`. The model has the policy's family, and the store is temporary.

    answer, lines = dry_run(recipe, Path("recipe.toml"))    # its errors are those of the real run

Prefect is not used: its pages would show versions that are deleted.

A dry run does not show whether anything is learned, how long it takes, or if it fits into memory.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from quiver.flows.look.words import counted
from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.stages.core.config import parse
from quiver.stages.core.run.stage_process import one_child_for_any_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.turns.statistics import FAILURES, first_failure

from .post_train import post_train
from .preflight import check_engines
from .recipe import Recipe
from .sections import Generate, merge

log = logging.getLogger("quiver")
PROMPTS, TOKENS, ITERATIONS = 4, 16, 2
COMMON_LETTERS = ("a", "e", "i", "n", "o", "r", "s", "t", " ")
"""Stop strings that end a turn, so that an environment has something to answer. Text of a random
model rarely goes long without one of them."""
SMALL_MODEL = "quiver.stages.model.small:make"
LOT = {"use": "quiver.stages.reward.functions:lot", "weight": 1e-3}
"""A random reward: random models answer nothing right, and equal rewards teach nothing."""
LOT_NAME = "random_reward_of_dry_run"
"""The name of this reward in warnings and errors."""
_READS_STORE = re.compile(r"quiver (?!(check|doctor|engines|keys|rewards) )")
"""In the next step of an error: a command that would look in the recipe's own store."""


def rehearsal(recipe: Recipe, store: str) -> Recipe:
    """Return `recipe` changed for a rehearsal in `store`: few rows, short answers, the small model,
    everything on this host."""
    sections = recipe.model_dump(exclude_unset=True)
    sampling = sections.get("generate", {}).get("sampling", {})
    held_out_sampling = recipe.evaluate.generate.get("sampling", {})
    ends = () if recipe.generate.turns is None else COMMON_LETTERS
    taken = recipe.reward.part_names
    names = (LOT_NAME, *(f"{LOT_NAME}_{number}" for number in range(2, len(taken) + 2)))
    lot = {**LOT, "name": next(name for name in names if name not in taken)}
    engine = {"engine": "transformers", "dtype": "float32"}
    changes = {
        "store": store,
        "iterations": min(recipe.iterations, ITERATIONS),
        "report_url": None,
        "data": {"limit": _few(recipe.data.limit)},
        "generate": {**engine, "sampling": _short(sampling, ends)},
        "evaluate": {"generate": {**engine, "sampling": _short(held_out_sampling, ends)}},
        "reward": {"functions": [*sections["reward"].get("functions", ()), lot]},
        "optimize": {
            "on_length": "keep",  # Nearly all answers of the small model are cut off.
            "mask_counted": False,
            "processes": None,
            "critic_from": None,
            "trackers": [],
        },
        "reference": {"policy": None},
    }
    if recipe.data.held_out is not None:
        changes["data"]["held_out"] = {"limit": _few(recipe.data.held_out.get("limit"))}
    refill = recipe.data.refill
    if refill is not None:  # cut as the rows are, so that it takes as many rounds
        few = refill.groups * _few(recipe.data.limit) // recipe.data.limit
        changes["data"]["refill"] = {"groups": max(few, 1)}
    sections = merge(sections, changes)
    for section in (sections["generate"], sections["evaluate"]["generate"]):
        section["options"] = {}  # They belong to the recipe's engine.
    original = {name: getattr(recipe.policy, name) for name in ("model", "revision", "arguments")}
    sections["policy"] = {"model": SMALL_MODEL, "arguments": original}
    sections["placement"] = {"python": recipe.placement.python}
    sections["retention"] = {}  # All is looked at afterwards.
    return parse(Recipe, sections, "--dry-run")


def dry_run(recipe: Recipe, path: Path) -> tuple[dict[str, Any], list[str]]:
    """Rehearse the recipe in `path`, and return the answer as JSON and as lines.

    The temporary store is deleted.
    """
    with tempfile.TemporaryDirectory(prefix="quiver-dry-run-") as store, one_child_for_any_stage():
        tried = rehearsal(recipe, store)
        planned = counted(tried.iterations, "iteration")
        log.info("%s: rehearsed for %s in a temporary store, %s", tried.run, planned, store)
        try:
            outcome = post_train.fn(tried)
            made = Store(store)
            policy = made.open(f"{tried.run}/policy@0")
            check_engines(recipe.data, recipe.generate, recipe.evaluate, policy)
            for rollouts in made.versions(kind="rollouts"):
                _require_whole_episodes(tried.generate, rollouts)
        except QuiverError as error:
            error.state = "the temporary store is deleted; nothing was kept."
            if _READS_STORE.search(f"{error.next} "):
                error.next = "correct what the message says, then repeat the dry run"
            raise
    seconds: dict[str, float] = {}
    for iteration in outcome["iterations"]:
        for stage, stage_seconds in iteration["seconds"].items():
            seconds[stage] = round(seconds.get(stage, 0.0) + stage_seconds, 3)
    answer = {"dry_run": True, "run": recipe.run, "seconds": seconds}
    lines = [f"{stage} {stage_seconds:.1f} s" for stage, stage_seconds in seconds.items()]
    both = {recipe.generate_config(1, evaluation=evaluation).engine for evaluation in (False, True)}
    engines = " and ".join(sorted(both - {"transformers"}))
    replaced = f", and engine transformers in place of {engines}" if engines else ""
    lines.append(
        f"{path} runs from end to end, with a small random model in place of "
        f"{recipe.policy.model}{replaced}; nothing was kept"
    )
    return answer, lines


def _require_whole_episodes(generate: Generate, rollouts: Version) -> None:
    """Raise ConfigError if the environment failed in an episode.

    The real run stops only if no episode has a reward, and here all that end have a random one.
    """
    if generate.turns is None:
        return
    table = rollouts.table()
    num_failed = pc.sum(pc.is_in(table["end_reason"], value_set=pa.array(FAILURES))).as_py()
    if num_failed:
        why = printable(first_failure(table) or "unknown")
        raise ConfigError(
            f"generate.turns {printable(', '.join(generate.turns.sources))}",
            f"{num_failed} of {counted(len(table), 'episode')} failed: {why}",
            next="quiver check RECIPE --try",
        )


def _short(sampling: dict[str, Any], ends: Sequence[str]) -> dict[str, Any]:
    """Return a sampling section for short answers, with `ends` as further stop strings."""
    most = min(sampling.get("max_tokens", TOKENS), TOKENS)
    fewest = min(sampling.get("min_tokens", 0), most)
    short = {**sampling, "max_tokens": most, "min_tokens": fewest}
    return {**short, "stop": [*sampling.get("stop", ()), *ends]} if ends else short


def _few(limit: int | None) -> int:
    return min(limit or PROMPTS, PROMPTS)
