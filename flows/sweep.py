"""Compare settings: each cell of a grid trains on the same saved rollouts, or is a run of its own.

    sweep(load("toy.toml"))           # its section [sweep] says what to compare
    read(store, "toy", name_of(load("toy.toml")))     # its record so far, from the store alone

With `sweep.rollouts`, a cell is reward → optimize, and no rollout is sampled for it; the comparison
ranks one update. Without it, a cell is a whole run with a name of its own. Either way the policy is
measured on the held-out rows, with the seeds and the [reward] of the recipe itself, so that all
cells are judged alike, and against the policy that the cells start from: the newest that sampled
the rollouts, else the base model.

The versions are ordinary ones, and finished ones are found again. So a sweep that was killed
continues, and a cell that failed is tried again by the same command. The object
`RUN/sweeps/NAME.json` in the store names the versions of each cell; NAME is a hash of the recipe.
It may be deleted, and holds no version back from `quiver gc`: manifests are enough to show it.

What a sweep makes has a note that begins with the sweep's name (`listing.is_of_sweep`), so reports
and `quiver gc --keep` do not take it for an iteration of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any

from quiver.schemas.errors import (
    ConfigError,
    LineageError,
    QuiverError,
    SchemaError,
    printable,
)
from quiver.schemas.manifest import digest
from quiver.schemas.refs import parse as parse_ref
from quiver.stages.core.config import parse
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.stage_process import end_waiting, one_child_for_any_stage
from quiver.stages.core.store import Store
from quiver.stages.core.store.storage import with_checksum
from quiver.stages.model import checkpoints

from .calls import calls_of, perform, run_here
from .estimation import estimate
from .evaluation import measure
from .look.sweeps import cell_rows, label_of, read
from .recipe import Recipe
from .rerun import find_refs, first_of_line, rerun
from .retention import Retention
from .sections import merge
from .slots import visible_gpus

MOST_CONTINUED = 2
"""Cells that `--then` continues."""
_FROZEN = ("reward", "optimize", "logprobs", "reference", "seed")
"""Sections and keys that do not change saved rollouts."""
_ALIKE = ("run", "store", "policy", "evaluate", "promotion", "schedule", "sweep")
"""Sections and keys that all cells share: where they start, how they are judged, and what a whole
run does not read."""
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

    def train(self, rollouts: Sequence[str], start: str) -> str:
        """Train by the recipe: the policy `start` on these rollouts, or in a run of its own.
        Returns the policy's reference."""
        recipe = self.recipe
        if rollouts:
            rewards = [rerun(recipe, "reward", {"rollouts": ref}).ref for ref in rollouts]
            refs = {"policy": start, "rollouts": list(rollouts), "rewards": rewards}
            return rerun(recipe, "optimize", refs).ref
        from .post_train import post_train
        from .preflight import preflight

        return post_train.fn(preflight(recipe))["iterations"][-1]["policy"]

    def train_further(
        self, num_then: int, store: Store, rollouts: Sequence[str], start: str
    ) -> str:
        """Train the cell's policy for so many further iterations, on fresh rollouts. Returns the
        last policy's reference."""
        from .post_train import Chain

        # it is found, or made again if its files expired
        policy = self.train(rollouts, start)
        # imported rollouts have no round
        rounds = [store.open(ref).manifest.config.get("round", 0) for ref in rollouts]
        # The cells share a run: its [retention] could delete the policy of the next one.
        options = {"iterations": 1 + num_then, "retention": Retention()}
        chain = Chain(self.recipe.model_copy(update=options).resolved())
        base = first_of_line(store, policy)
        return chain.improve(policy, base, first=2, first_round=max(rounds) + 1)[-1].policy


def cells_of(recipe: Recipe) -> list[Cell]:
    """Return the cells of the recipe's grid. Raises ConfigError if one of them is no recipe."""
    grid = recipe.sweep.model_dump(mode="json")["over"]
    if recipe.sweep.num_seeds > 1:
        if "seed" in grid:
            raise ConfigError(
                "sweep.over seed",
                "names seeds, and sweep.num_seeds (--seeds) does so too",
                next="leave one of them out",
            )
        grid["seed"] = [recipe.seed + index for index in range(recipe.sweep.num_seeds)]
    if not grid:
        raise ConfigError(
            "sweep.over", "names no key to compare", next="quiver sweep RECIPE --over KEY=V1,V2"
        )
    for key, values in grid.items():
        _check_key(key, values, is_whole_run=not recipe.sweep.rollouts)
    plain = recipe.model_dump(exclude_unset=True, exclude={"sweep"})
    cells = []
    for number, values in enumerate(product(*grid.values()), 1):
        settings = dict(zip(grid, values, strict=True))
        sections = plain
        for key, value in settings.items():
            over: Any = value
            if isinstance(value, dict) and key != "data":  # its name is for the table
                over = {name: part for name, part in value.items() if name != "name"}
            for name in reversed(key.split(".")):
                over = {name: over}
            sections = merge(sections, over)
        if not recipe.sweep.rollouts:
            run = f"{recipe.run}-{digest(settings)[:6]}"
            sections = merge(sections, {"run": run, "data": {"held_out": None}})
        # the recipe's own [reward] and [evaluate] judge
        changed = parse(Recipe, sections, f"sweep cell {number}", context={"measures": False})
        if recipe.sweep.rollouts and "seed" in grid and changed.optimize.seed is not None:
            raise ConfigError(
                "optimize.seed",
                "is set, so that the seeds to compare change nothing",
                next="leave it out, or compare values of optimize.seed",
            )
        cells.append(Cell(number, settings, changed))
    return cells


def _check_key(key: str, values: Sequence[Any], is_whole_run: bool) -> None:
    """Raise ConfigError if a key of `sweep.over` would change nothing, or how cells are judged."""
    section = key.partition(".")[0]
    name = f"sweep.over {printable(key)}"
    if not is_whole_run:
        if section not in _FROZEN:
            raise ConfigError(
                name,
                f"does not change what is learned from saved rollouts; these do: "
                f"{', '.join(_FROZEN)}",
                next="leave sweep.rollouts out, so that each cell is a whole run",
            )
        return
    tables = [value for value in values if isinstance(value, dict)]
    is_held_out = key.startswith("data.held_out") or (
        key == "data" and any("held_out" in table for table in tables)
    )
    if section in _ALIKE or is_held_out:
        raise ConfigError(
            name,
            f"is the same for all cells, as are {', '.join(_ALIKE)} and data.held_out",
            next="compare other keys, or start a sweep for each value",
        )


def sweep(recipe: Recipe, num_then: int = 0, *, estimated: bool = False) -> dict[str, Any]:
    """Make what is missing of each cell, and return its record: references by cell, and settings.

    Args:
        num_then: Also train the best cells for so many further iterations, on fresh rollouts.
        estimated: Estimate the trained policies first, and measure only those that may be the best.

    An error of a cell is noted there, and the others continue. Raises any error of the measurement
    before them, and ConfigError.
    """
    recipe.data.require_held_out()
    cells = cells_of(recipe)
    store = Store(recipe.store)
    named = recipe.sweep.rollouts or []
    refs = [named] if isinstance(named, str) else named
    rollouts = [str(store.resolve(ref, recipe.run)) for ref in refs]
    running = _Running(store, recipe.run, name_of(recipe), rollouts)
    if num_then and not rollouts:
        raise ConfigError("--then", "needs sweep.rollouts", next="raise iterations instead")
    judge = recipe.held_out_resolved()
    try:
        # one block, so that its checks are done once
        with _calls(recipe, note=running.note):
            if rollouts:
                sampled = {"rollouts": rollouts}
                [start] = find_refs(recipe, store, "optimize", "policy", sampled)
            else:
                start = perform("policy", checkpoints.resolve(recipe.policy), {}).ref
            baseline = running.record["baseline"] = measure(judge, start, 0).ref
            running.begin(cells)
            running.train("cells", cells, lambda cell: cell.train(rollouts, start))
            if estimated:
                running.estimate(partial(estimate, recipe), baseline)
            running.measure("cells", cells, judge, baseline)
            if num_then:
                _continue_best(running, cells, judge, start, num_then)
            running.save(ended=True)
    finally:
        end_waiting()
    return running.record


class _Running:
    """A sweep at work: what is known of it, saved after each cell."""

    def __init__(self, store: Store, run: str, name: str, rollouts: Sequence[str]) -> None:
        self.store = store
        self._before = read(store, run, name) or {"cells": {}, "then": {}}
        # Functions, models and rollouts may have changed since: only what is found again counts.
        self.record = {**self._before, "cells": {}}
        self.record |= {"sweep": name, "run": run, "rollouts": rollouts}
        self.record.setdefault("begun", datetime.now(UTC).isoformat(timespec="milliseconds"))
        self.note = f"sweep {name}"
        self._key = f"{run}/sweeps/{name}.json"

    def begin(self, cells: Sequence[Cell]) -> None:
        """Save the settings of all cells, so that a sweep that is killed in its first is known."""
        self.record["cells"] = {str(cell.number): {"settings": cell.settings} for cell in cells}
        self.save()

    def train(self, part: str, cells: Sequence[Cell], train: Callable[[Cell], str]) -> None:
        """Train each cell."""
        for cell in cells:
            note = f"{self.note}, {cell.name}"
            with self._trying(part, cell) as entry, _calls(cell.recipe, note=note):
                policy = train(cell)
                # by its note, so that it stays so when the sweep finds its own cells again
                maker = self.store.with_expired().version(parse_ref(policy)).manifest.note
                entry |= {"policy": policy, "cached": maker != note}

    def estimate(self, estimate: Callable[..., Any], baseline: str) -> None:
        """Estimate the cells' policies by `estimate` from the rollouts of the evaluation
        `baseline`."""
        trained = self._trained("cells")
        policies = list(dict.fromkeys(entry["policy"] for entry in trained))
        try:
            answers = estimate(policies, [baseline])["estimates"]
        except (ConfigError, LineageError, SchemaError) as error:
            log.warning("nothing is estimated, so each cell is measured: %s", error.message)
            return
        by_policy = {answer["policy"]: answer for answer in answers}
        for entry in trained:
            answer = by_policy[entry["policy"]]
            names = ("estimate", "interval", "refused")
            entry["estimate"] = {name: answer[name] for name in names}

    def measure(self, part: str, cells: Sequence[Cell], judge: Recipe, baseline: str) -> None:
        """Measure the cells' policies by `judge`, against the evaluation `baseline`. A policy whose
        estimate says that it cannot be the best is left out."""
        before = {number: entry.get("evaluation") for number, entry in self._before[part].items()}
        hopeless = _hopeless(self._trained(part))
        for cell in cells:
            with self._trying(part, cell) as entry:
                if "policy" in entry and entry["policy"] not in hopeless:
                    evaluation = measure(judge, entry["policy"], 1, baseline=baseline)
                    entry["evaluation"] = evaluation.ref
                    score = evaluation.metrics["score"]
                    log.info("%s: %s, score %.4f", cell.name, entry["policy"], score)
            if part == "cells" and entry.get("evaluation") != before.get(str(cell.number)):
                self.record["then"] = {}  # it continues other policies
                self.save()

    def _trained(self, part: str) -> list[dict[str, Any]]:
        return [entry for entry in self.record[part].values() if "policy" in entry]

    @contextmanager
    def _trying(self, part: str, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yield the cell's entry, note an error in it, and save it."""
        entry = self.record[part].setdefault(str(cell.number), {"settings": cell.settings})
        try:
            yield entry
        except QuiverError as error:
            entry["error"] = error.to_dict()
            log.warning("%s: %s %s: %s", cell.name, error.code, error.object, error.message)
        self.save()

    def save(self, *, ended: bool = False) -> None:
        """Save the record. Until the sweep has `ended`, a record of more finished cells stays: a
        sweep that is typed again and killed would lose them."""
        if ended or _num_ended(self.record) >= _num_ended(self._before):
            self.store.storage.put(self._key, with_checksum(self.record))


def _num_ended(record: Mapping[str, Any]) -> int:
    """Return the number of cells, continued ones too, that were measured or failed."""
    entries = [*record["cells"].values(), *record["then"].values()]
    return sum("evaluation" in entry or "error" in entry for entry in entries)


def _hopeless(entries: Sequence[dict[str, Any]]) -> set[str]:
    """Return the policies whose estimated interval ends below where another one's begins."""
    intervals = {
        entry["policy"]: entry["estimate"]["interval"]
        for entry in entries
        if "estimate" in entry and not entry["estimate"]["refused"]
    }
    best = max((low for low, _ in intervals.values()), default=0)
    return {policy for policy, (_, high) in intervals.items() if high < best}


def _continue_best(
    running: _Running, cells: Sequence[Cell], judge: Recipe, start: str, num_then: int
) -> None:
    """Train the best cells further, and measure them and the start on the same rows with other
    seeds: the luck of the best with the sweep's seeds must not count again.

    Of cells with the same weights, or that differ in their seed only, the best alone continues.
    """
    store = running.store
    sampled = judge.generate_config(0, evaluation=True)
    if sampled.sampling.temperature == 0:
        log.warning(
            "the held-out answers are sampled at temperature 0, where other seeds change nothing: "
            "the luck of the best cells counts again"
        )
    generate = {**judge.evaluate.generate, "seed": sampled.seed + 1}
    evaluate = judge.evaluate.model_copy(update={"generate": generate})
    fresh = judge.model_copy(update={"evaluate": evaluate})
    baseline = running.record["then_baseline"] = measure(fresh, start, 0).ref
    running.record["then"] = {}
    rollouts = running.record["rollouts"]
    rows = _distinct(cell_rows(store, running.record["cells"]))[:MOST_CONTINUED]
    best = [cells[row["cell"] - 1] for row in rows]
    running.train("then", best, lambda cell: cell.train_further(num_then, store, rollouts, start))
    running.measure("then", best, fresh, baseline)


def _distinct(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the measured rows without repetitions of an earlier one: the same weights, or the same
    settings with another seed."""
    seen: set[str] = set()
    distinct = []
    for row in rows:
        if row["evaluation"]:
            settings = {
                key: value
                for key, value in row["settings"].items()
                if key.rpartition(".")[2] != "seed"
            }
            marks = {digest(settings), row["weights"]}
            if seen.isdisjoint(marks):
                distinct.append(row)
            seen |= marks
    return distinct


def _run(call: Call, upcoming: Sequence[Call], tags: Sequence[str]) -> Outcome:
    """Run a call; if its stage leaves no device and no foreign engine behind, in the process of
    the calls before it, which has imported what it needs."""
    is_light = call.config.get("engine") in _LIGHT_ENGINES and not call.config.get("models")
    is_shared = is_light and (call.stage in _WITHOUT_DEVICE or not visible_gpus())
    with one_child_for_any_stage() if is_shared else nullcontext():
        return run_here(call, upcoming, tags)


_calls = partial(calls_of, runner=_run)


def name_of(recipe: Recipe) -> str:
    """Return the sweep's name, by what decides its results."""
    return digest(recipe.model_dump(mode="json", exclude={"store", "placement", "retention"}))[:12]
