"""Compare settings: each cell of a grid trains on the same saved rollouts, or is a run of its own.

    sweep(load("toy.toml"))           # its section [sweep] says what to compare
    saved(load("toy.toml"))           # what is known of it, from the store alone

With `sweep.rollouts`, a cell is reward → optimize, and no rollout is sampled for it; the comparison
ranks one update. Without it, a cell is a whole run with a name of its own. Either way the policy is
measured on the held-out rows, with the seeds and the [reward] of the recipe itself, so that all
cells are judged alike, and against the policy that the cells start from.

The versions are ordinary ones, and finished ones are found again. So a sweep that was killed
continues, and a cell that failed is tried again by the same command. The object
`RUN/sweeps/NAME.json` in the store names the versions of each cell; NAME is a hash of the recipe.
It may be deleted, and holds no version back from `quiver gc`: manifests are enough to show it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.schemas.manifest import digest
from quiver.stages.core.config import parse
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.stage_process import end_waiting, one_child_for_any_stage
from quiver.stages.core.store import Store
from quiver.stages.core.store.storage import read_checked, with_checksum
from quiver.stages.model import checkpoints

from .calls import calls_of, perform, run_here
from .evaluation import measure
from .look.sweeps import cell_rows, label_of
from .recipe import Recipe
from .rerun import first_of_line, rerun, sampling_policy
from .sections import merge
from .slots import visible_gpus

MOST_CONTINUED = 2
"""Cells that `--then` continues."""
_FROZEN = ("reward", "optimize", "logprobs", "reference", "seed")
"""Sections and keys that do not change saved rollouts."""
_WITHOUT_DEVICE = ("prompt", "reward", "evaluate")
_LIGHT_ENGINES = (None, "transformers", "scripted", "vllm-server")
log = logging.getLogger("quiver")


@dataclass(frozen=True)
class Cell:
    """One choice of settings."""

    number: int
    settings: dict[str, Any]
    """Value by key, as [sweep] gives them."""
    recipe: Recipe

    @property
    def name(self) -> str:
        """Number and settings in words."""
        return f"cell {self.number} ({', '.join(map(label_of, self.settings.values()))})"


def cells_of(recipe: Recipe) -> list[Cell]:
    """Return the cells of the recipe's grid. Raises ConfigError if one of them is no recipe."""
    grid = recipe.sweep.model_dump(mode="json")["over"]
    if recipe.sweep.num_seeds > 1:
        grid["seed"] = [recipe.seed + index for index in range(recipe.sweep.num_seeds)]
    if not grid:
        raise ConfigError(
            "sweep.over", "names no key to compare", next="quiver sweep RECIPE --over KEY=V1,V2"
        )
    for key in grid if recipe.sweep.rollouts else ():
        if key.partition(".")[0] not in _FROZEN:
            raise ConfigError(
                f"sweep.over {printable(key)}",
                f"does not change saved rollouts; these do: {', '.join(_FROZEN)}",
                next="leave sweep.rollouts out, so that each cell is a whole run",
            )
    plain = recipe.model_dump(exclude_unset=True, exclude={"sweep"})
    cells = []
    for number, values in enumerate(product(*grid.values()), 1):
        settings = dict(zip(grid, values, strict=True))
        sections = plain
        for key, value in settings.items():
            over: Any = value
            if isinstance(value, dict):  # its name is for the table
                over = {name: part for name, part in value.items() if name != "name"}
            for name in reversed(key.split(".")):
                over = {name: over}
            sections = merge(sections, over)
        if not recipe.sweep.rollouts:
            run = f"{recipe.run}-{digest(settings)[:6]}"
            sections = merge(sections, {"run": run, "data": {"held_out": None}})
        # the recipe's own [reward] and [evaluate] judge
        changed = parse(Recipe, sections, f"sweep cell {number}", context={})
        cells.append(Cell(number, settings, changed))
    return cells


def sweep(recipe: Recipe, num_then: int = 0) -> dict[str, Any]:
    """Make what is missing of each cell, and return what `saved` returns.

    Args:
        num_then: Also train the best cells for so many further iterations, on fresh rollouts.

    An error of a cell is noted there, and the others continue. Raises any error of the measurement
    before them, and ConfigError.
    """
    recipe.data.require_held_out()
    cells = cells_of(recipe)
    running = _Running(recipe)
    rollouts = running.record["rollouts"]
    if num_then and not rollouts:
        raise ConfigError("--then", "needs sweep.rollouts", next="raise iterations instead")
    judge = recipe.held_out_resolved()
    try:
        # one block, so that its checks are done once
        with _calls(recipe):
            if rollouts:
                start = sampling_policy(running.store, rollouts[0])
            else:
                start = perform("policy", checkpoints.resolve(recipe.policy), {}).ref
            baseline = running.record["baseline"] = measure(judge, start, 0).ref
            for cell in cells:
                running.fill("cells", cell, partial(_train, cell.recipe, rollouts), judge, baseline)
            if num_then:
                _continue_best(running, cells, judge, start, num_then)
    finally:
        end_waiting()
    return running.record


class _Running:
    """A sweep at work: what is known of it, saved after each cell."""

    def __init__(self, recipe: Recipe) -> None:
        self.store = Store(recipe.store)
        named = recipe.sweep.rollouts or []
        refs = [named] if isinstance(named, str) else named
        rollouts = [str(self.store.resolve(ref, recipe.run)) for ref in refs]
        self.record = _read(recipe, self.store) or {"cells": {}, "then": {}}
        self.record |= {"sweep": _name(recipe), "run": recipe.run, "rollouts": rollouts}
        self._key = _key(recipe)

    def fill(
        self, part: str, cell: Cell, train: Callable[[], Outcome], judge: Recipe, baseline: str
    ) -> None:
        """Train a cell and measure its policy by `judge`, against the evaluation `baseline`."""
        entry: dict[str, Any] = {"settings": cell.settings}
        try:
            with _calls(cell.recipe, note=f"sweep {self.record['sweep']}, {cell.name}"):
                policy = train()
            evaluation = measure(judge, policy.ref, 1, baseline=baseline)
            entry |= {"policy": policy.ref, "cached": policy.cached, "evaluation": evaluation.ref}
            log.info("%s: %s, score %.4f", cell.name, policy.ref, evaluation.metrics["score"])
        except QuiverError as error:
            entry["error"] = error.to_dict()
            log.warning("%s: %s %s: %s", cell.name, error.code, error.object, error.message)
        self.record[part][str(cell.number)] = entry
        self.store.storage.put(self._key, with_checksum(self.record))


def _continue_best(
    running: _Running, cells: Sequence[Cell], judge: Recipe, start: str, num_then: int
) -> None:
    """Train the best cells further, and measure them and the start with other seeds: the luck of
    the best with the sweep's seeds must not count again."""
    store = running.store
    seed = judge.generate_config(0, evaluation=True).seed + 1
    generate = {**judge.evaluate.generate, "seed": seed}
    evaluate = judge.evaluate.model_copy(update={"generate": generate})
    fresh = judge.model_copy(update={"evaluate": evaluate})
    baseline = measure(fresh, start, 0).ref
    running.record["then"] = {}
    rollouts = running.record["rollouts"]
    rows = [row for row in cell_rows(store, running.record["cells"]) if row["evaluation"]]
    for row in rows[:MOST_CONTINUED]:
        cell = cells[row["cell"] - 1]
        longer = cell.recipe.model_copy(update={"iterations": 1 + num_then})
        train = partial(_continue, longer, store, rollouts, row["policy"])
        running.fill("then", cell, train, fresh, baseline)


def saved(recipe: Recipe) -> dict[str, Any]:
    """Return the sweep of the recipe as far as it was made: references by cell, and settings.

    Raises ConfigError if it was never begun.
    """
    record = _read(recipe, Store(recipe.store, create=False))
    if record is None:
        raise ConfigError(
            f"sweep of {recipe.run}",
            "the store has none with these settings",
            next="quiver sweep RECIPE",
        )
    return record


def _train(recipe: Recipe, rollouts: Sequence[str]) -> Outcome:
    """Train by a cell's recipe: on these rollouts, or in a run of its own."""
    if rollouts:
        rewards = [rerun(recipe, "reward", {"rollouts": ref}).ref for ref in rollouts]
        return rerun(recipe, "optimize", {"rollouts": list(rollouts), "rewards": rewards})
    from .post_train import post_train
    from .preflight import preflight

    before = Store(recipe.store).numbers(recipe.run, "policy")
    policy = post_train.fn(preflight(recipe))["iterations"][-1]["policy"]
    is_cached = before == Store(recipe.store).numbers(recipe.run, "policy")
    return Outcome(policy, is_cached, rows=0, seconds=0.0, metrics={})


def _continue(recipe: Recipe, store: Store, rollouts: Sequence[str], policy: str) -> Outcome:
    """Train a cell's policy for the recipe's iterations after the first, on fresh rollouts."""
    from .post_train import Chain

    rounds = [store.open(ref).manifest.config["round"] for ref in rollouts]
    chain = Chain(recipe.resolved())
    base = first_of_line(store, policy)
    iterations = chain.improve(policy, base, first=2, first_round=max(rounds) + 1)
    return Outcome(iterations[-1].policy, cached=False, rows=0, seconds=0.0, metrics={})


def _run(call: Call, upcoming: Sequence[Call], tags: Sequence[str]) -> Outcome:
    """Run a call; if its stage leaves no device and no foreign engine behind, in the process of
    the calls before it, which has imported what it needs."""
    is_light = call.config.get("engine") in _LIGHT_ENGINES and not call.config.get("models")
    is_shared = is_light and (call.stage in _WITHOUT_DEVICE or not visible_gpus())
    with one_child_for_any_stage() if is_shared else nullcontext():
        return run_here(call, upcoming, tags)


_calls = partial(calls_of, runner_of=lambda call: _run)


def _name(recipe: Recipe) -> str:
    """Return the sweep's name, by what decides its results."""
    return digest(recipe.model_dump(mode="json", exclude={"store", "placement", "retention"}))[:12]


def _key(recipe: Recipe) -> str:
    return f"{recipe.run}/sweeps/{_name(recipe)}.json"


def _read(recipe: Recipe, store: Store) -> dict[str, Any] | None:
    """Return what is saved of the sweep; None if nothing is, or if it is damaged."""
    try:
        return read_checked(store.storage, _key(recipe))
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
        return None
