"""The calls of one run: each is looked up, run if its version is not finished, and logged.

    with by_hand(recipe):
        prompts = perform("prompt", recipe.prompt_config(1), {"policy": "arith/policy@0"})

`perform` returns the `Outcome` of a call, and logs one line about it if it has a label. Inside
`by_hand`, calls run without Prefect; inside `tasks.as_tasks`, each is a task. The block says which
run and store the versions belong to, and where each stage runs.

In `as_tasks`, a finished version stays finished after its files expire: its manifest is enough. If
an unfinished stage must read such files, a new version is made by repeating the call this run used.
A trained policy is never made again without being asked for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from quiver import flows
from quiver.flows.look.words import counted, unscored_of
from quiver.schemas.cells import fields_of
from quiver.schemas.errors import LineageError, QuiverError
from quiver.schemas.manifest import digest
from quiver.schemas.refs import parse
from quiver.stages.core.config import Config
from quiver.stages.core.ranks import follows_rank_0, knows_ranks
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.runner import find_outcome
from quiver.stages.core.run.stage import Refs, load_stage
from quiver.stages.core.store import Store

from .dispatch import run_at
from .placement import keeps_engine, runs_here, where_of
from .prefect_server import tell_version
from .recipe import Recipe
from .slots import visible_gpus

_POLL_SECONDS = 1.0
log = logging.getLogger("quiver")
CallRunner = Callable[[Call, Sequence[Call], Sequence[str]], Outcome]
"""Runs a call whose version is not finished; also takes the calls that come next, and the tags for
Prefect."""


class NotFinished(Exception):
    """Raised instead of running a call, in a block that only looks up what is finished."""


@dataclass
class _Run:
    """The recipe's run, as `perform` sees it: which versions it made, and how its calls run."""

    recipe: Recipe
    """The recipe; its `placement.resident_engine` is decided."""
    runner: CallRunner | None
    """Runs calls whose version is not finished. None: `NotFinished` is raised instead."""
    expired: bool = False
    """If true, a finished version whose files expired counts as done."""
    note: str = ""
    """The user's words for the manifests of the versions that are made."""
    checked: set[tuple[str, str]] = field(default_factory=set)
    """Stages already checked, each with a digest of the prompts' form."""
    again: dict[str, Callable[[], Outcome]] = field(default_factory=dict)
    """Functions that make a version again, by its reference."""

    def call(self, stage: str, config: Config, refs: Refs, label: str = "") -> Call:
        """Return a call of this run, to be run where [placement] says."""
        recipe = self.recipe
        return Call(
            stage,
            config.model_dump(mode="json"),
            recipe.store,
            dict(refs),
            into=recipe.run,
            label=f"{recipe.run} · {label or stage}",
            note=self.note,
            where=where_of(recipe.placement, stage, online=recipe.online),
        )

    def with_files(self, ref: str | list[str]) -> str | list[str]:
        """Return a reference whose files can be read: `ref`, if it or its repeat has them (a later
        version of the same content, which opening `ref` then gives), else that of a version made
        again.

        Raises LineageError if none can be made.
        """
        if isinstance(ref, list):
            return [self.with_files(single) for single in ref]
        store = Store(self.recipe.store)
        if store.exists(parse(ref)):
            return ref
        if ref in self.again:
            return self.again[ref]().ref
        try:
            return str(store.resolve(ref))  # raises the error that says what is gone
        except LineageError as error:
            error.next = "quiver run RECIPE --from optimize"
            raise


_RUN: ContextVar[_Run] = ContextVar("quiver_run")


@contextmanager
def calls_of(
    recipe: Recipe,
    runner: CallRunner | None,
    *,
    expired: bool = False,
    note: str = "",
) -> Iterator[None]:
    """Let `perform` inside belong to the recipe's run, and run its calls by `runner`. If it is
    None, nothing is run: the first call that is not finished raises NotFinished.

    `check_stages` checks each stage once within it. If `expired` is true, finished versions whose
    files expired count as done. `note` goes into the manifest of each version that is made; by
    default, the note of the block around this one.
    """
    decided = {"resident_engine": keeps_engine(recipe, len(visible_gpus()))}
    placement = recipe.placement.model_copy(update=decided)
    recipe = recipe.model_copy(update={"placement": placement})
    enclosing = _RUN.get(None)
    if enclosing is not None:
        note = note or enclosing.note
    token = _RUN.set(_Run(recipe, runner, expired, note))
    try:
        yield
    finally:
        _RUN.reset(token)


def run_here(call: Call, upcoming: Sequence[Call], tags: Sequence[str]) -> Outcome:
    """Run a call without Prefect and leave no resident process. If PREFECT_API_URL names a server,
    report the version to it."""
    outcome = run_at(replace(call, where=replace(call.where, resident_engine=False)))
    tell_version(call, outcome)
    return outcome


by_hand = partial(calls_of, runner=run_here)
"""Let calls of a recipe's run inside do without Prefect: `with by_hand(recipe): …`"""


def perform(
    stage: str,
    config: Config,
    refs: Refs,
    *,
    label: str = "",
    into: str | None = None,
    force: bool = False,
    iteration: int | None = None,
    upcoming: Mapping[str, Config] = MappingProxyType({}),
    needs_files: bool = False,
    before: Callable[[], None] = lambda: None,
) -> Outcome:
    """Find the version that answers a call, or run the call where [placement] says, and log a line.

    Args:
        stage: Name of the stage.
        config: Config of the stage.
        refs: References by role.
        label: Name in logs, such as `generate 2/5`. Default: nothing is logged.
        into: Run that the new version belongs to. Default: the recipe's.
        force: Run it again even if a finished version exists. A forced stage is not retried, since
            a retry would repeat even what the failed attempt finished.
        iteration: Iteration that the task is tagged with.
        upcoming: Configs of the next stages, by name; their processes import modules while this
            stage runs.
        needs_files: Do not accept a version whose files expired, because its files will be read.
        before: Called before the call is run, if it is; its error ends `perform`.
    """
    run = _RUN.get()
    call = run.call(stage, config, refs, label)
    call = replace(call, into=into or call.into, force=force)
    outcome = find_outcome(call, expired=run.expired)
    if needs_files and outcome is not None and not Store(call.store).exists(parse(outcome.ref)):
        outcome = None
    # Under torchrun each rank runs the command `quiver optimize`, so several are here at once. If a
    # version is missing whose stage knows no ranks, such as logprobs, rank 0 makes it and the
    # others wait here. If it fails, the launcher ends its host's ranks.
    while outcome is None and follows_rank_0() and not knows_ranks(stage):
        time.sleep(_POLL_SECONDS)
        outcome = find_outcome(call)
    if outcome is None:
        if run.runner is None:
            raise NotFinished(call.label)
        before()
        if run.expired:
            refs = {role: run.with_files(ref) for role, ref in refs.items()}
            call = replace(call, refs=refs)
        next_calls = [run.call(name, following, {}) for name, following in upcoming.items()]
        outcome = run.runner(call, next_calls, prefect_tags(run.recipe.run, stage, iteration))
        flows.num_made += not outcome.cached
    if label:
        log.info("%s", describe(label, outcome))
    # Training is never repeated unasked because files expired.
    if stage != "optimize":
        options = {"label": f"{label}, again", "into": into, "iteration": iteration}
        run.again[outcome.ref] = partial(perform, stage, config, refs, needs_files=True, **options)
    return outcome


def prefect_tags(
    run: str, stage: str | None = None, iteration: int | None = None
) -> tuple[str, ...]:
    """Return the tags of a flow run in Prefect: `run:arith`, `stage:generate`, `iteration:3`."""
    values = {"run": run, "stage": stage, "iteration": iteration}
    return tuple(f"{key}:{value}" for key, value in values.items() if value is not None)


def check_stages(
    configs: Mapping[str, Config], prompts: str | None = None, offered: Sequence[str] = ()
) -> None:
    """Raise ConfigError if one of the stages in `configs` cannot run, e.g. because a scorer is
    missing.

    A stage that is checked without prompts is not checked again. With prompts, it is checked once
    for each form of prompts: their columns, and the text with which an answer starts. A stage is
    checked only if it runs on this host and under this interpreter. `offered`: columns that a
    reward function may read besides the prompts'.
    """
    run = _RUN.get()
    columns: dict[str, Any] = {}
    version = None
    form = ""
    if prompts is not None:
        version = Store(run.recipe.store).open(run.with_files(prompts))
        columns = fields_of(version.table(["columns"])["columns"]) or {}
        form = digest([columns, version.manifest.metrics.get("assistant_starts")])
    for stage, config in configs.items():
        if not runs_here(run.recipe.placement, stage):
            continue
        if run.checked.isdisjoint({(stage, ""), (stage, form)}):
            try:
                load_stage(stage).check(config, {**columns, **dict.fromkeys(offered, ())}, version)
            except QuiverError as error:
                if version is not None:
                    sources = f"{version.ref} and what it was made of"
                    error.state = f"{sources} are kept; nothing was generated."
                raise
        run.checked.add((stage, form))


def describe(label: str, outcome: Outcome) -> str:
    """Return one line about a finished stage: label, reference, rows, seconds, main metric."""
    if outcome.cached:
        return f"{label:<22} {outcome.ref}  already done"
    formats = {
        "tokens_per_second": "{:.0f} tokens/s",
        "reward_mean": "reward {:.3f}",
        "score": "score {:.3f}",
        "loss": "loss {:.4f}",
    }
    words = [counted(outcome.rows, "row")] if outcome.rows else []
    words.append(f"{outcome.seconds:.1f} s")
    for name, form in formats.items():
        metric = outcome.metrics.get(name)
        if metric is not None:
            words.append(form.format(metric))
    missing = outcome.metrics.get("reward_null")
    if missing:
        words.append(f"{missing} not scored")
    return f"{label:<22} {outcome.ref}  {'  '.join(words)}{unscored_of(outcome.metrics)}"
