"""The one Prefect task that runs every stage; also retries, run state and expired versions.

The task passes references and small numbers, never data. Its cache is the store, not Prefect's.

The task is called directly, never submitted, so that a cancelled flow ends the stage at once. Its
name holds run, stage and iteration. Flow runs carry tags, task runs do not: Prefect asks its server
for a slot for each tag of a task, before and after it. A task is retried, with growing pauses, if
the error's code says that a retry can help.

Within a run, a finished version stays finished after its files expire, because its manifest is
enough. If an unfinished stage must read such files, they are restored from the trash, or made again
by repeating the call this run used. A trained policy is never made again without being asked for.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType

from prefect import Task, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import FlowRunContext, TagsContext

from quiver.schemas.errors import SYSTEM_REASONS, LineageError, QuiverError
from quiver.schemas.manifest import digest
from quiver.schemas.refs import parse
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.holding import end_waiting
from quiver.stages.common.runtime.runner import Outcome, find
from quiver.stages.common.runtime.stage import Refs, load
from quiver.stages.common.store import Store
from quiver.stages.common.store.retention import restore
from quiver.stages.report.words import counted, unscored_of

from . import logs  # noqa: F401  lines go to Prefect's pages
from .commands.shared import CALLED
from .dispatch import run_when_free
from .pages import publish
from .placement import GivenUp, StageCall, stage_call
from .progress import progress
from .recipe import Placement, Recipe

WORTH_RETRYING = {"E-REMOTE", "E-RESOURCE"}
_REFUSED = tuple(SYSTEM_REASONS[number] for number in (errno.EROFS, errno.EACCES, errno.EPERM))
"""Prefixes of errors from a host that forbids writing; a retry cannot help."""
_LONGEST_WORD = 100
log = logging.getLogger("quiver")


@dataclass
class _Run:
    """State kept during one run."""

    expired: bool = False
    """If true, a finished version whose files expired counts as done."""
    checked: set[tuple[str, str]] = field(default_factory=set)
    """Stages already checked, each with a digest of the prompts' form."""
    again: dict[str, Callable[[], Outcome]] = field(default_factory=dict)
    """Function that makes a version again, by its reference."""
    only_look: bool = False
    """If true, nothing is made: a stage that is not finished raises NotFinished."""


class NotFinished(Exception):
    """Raised inside `only_looking` by a stage that is not done yet."""


_RUN: ContextVar[_Run | None] = ContextVar("quiver_run", default=None)
"""State of the current run. None: outside a run."""


def worth_retrying(task: Task, run: TaskRun, state: State) -> bool:
    """True if the error may be transient: a server, memory or a process was lost.

    Never for bad input, nor for a store that cannot be written.
    """
    error = state.data
    if not isinstance(error, QuiverError) or isinstance(error, GivenUp):
        return False
    if error.code not in WORTH_RETRYING or error.message.startswith(_REFUSED):
        return False
    log.warning("%s: %s; it is tried again soon", error.object, error.message)
    # A sleeping engine holds memory of the device and of this machine, which the retry may need.
    end_waiting()
    return True


@task(
    name="stage",
    task_run_name="{call.label}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_condition_fn=worth_retrying,
)
def stage_task(
    call: StageCall,
    placement: Placement,
    upcoming: tuple[StageCall, ...],
    labels: tuple[str, ...],
) -> Outcome:
    """Run one stage and return its reference with a few numbers.

    A finished version with the same run key is returned at once ("already done"). Of the metrics,
    only single numbers and short words are returned.
    """
    with progress(call.runner_call, logging.getLogger(f"quiver.{call.stage}").info) as on_line:
        outcome = run_when_free(
            call,
            placement,
            upcoming=upcoming,
            tags=labels,
            on_line=on_line,
            resident=placement.resident_engine,
        )
    publish(call.runner_call, outcome)
    metrics = {}
    for name, metric in outcome.metrics.items():
        is_word = isinstance(metric, str) and len(metric) <= _LONGEST_WORD
        if metric is None or isinstance(metric, int | float) or is_word:
            metrics[name] = metric
    return replace(outcome, metrics=metrics)


def perform(
    recipe: Recipe,
    stage: str,
    config: Config,
    refs: Refs,
    *,
    label: str = "",
    into: str | None = None,
    force: bool = False,
    iteration: int | None = None,
    round: int | None = None,
    next_configs: Mapping[str, Config] = MappingProxyType({}),
    readable: bool = False,
) -> Outcome:
    """Run `stage` of `recipe` as a task, within the pool and limits of [placement], and log one
    line about it.

    Outside a flow run no server is asked, and nothing is retried.

    Args:
        recipe: Gives the run, the store and the placement.
        stage: Name of the stage.
        config: Config of the stage.
        refs: References by role.
        label: Name in logs. Default: stage and iteration, `generate 2/5`.
        into: Run that the new version belongs to. Default: the recipe's.
        force: Run it again even if a finished version exists. A forced stage is not retried, since
            a retry would repeat even what the failed attempt finished.
        iteration: Iteration that the task is tagged with.
        round: Shown in the label if [data] refill allows several rounds per iteration.
        next_configs: Configs of the next stages, by name; their processes import modules while this
            stage runs.
        readable: Do not accept a version whose files expired, because its files will be read.

    Raises:
        NotFinished: Inside `only_looking`, if the stage is not done.
    """
    if not label:
        label = f"{stage} {iteration}/{recipe.iterations}"
        if round is not None and recipe.data.refill is not None:
            label += f" round {round}"
    run = _RUN.get() or _Run()
    expired = run.expired and not readable
    call = stage_call(
        recipe, stage, config, refs, label=label, into=into, force=force, expired=expired
    )
    if run.only_look:
        outcome = find(call.runner_call, expired=True)
        if outcome is None:
            raise NotFinished(label)
        return outcome
    if run.expired and not _is_done(call):
        refs = {role: _readable(recipe, ref) for role, ref in refs.items()}
        call = call.model_copy(update={"refs": refs})
    placement = recipe.placement
    retries = 0 if force else placement.retries
    delays = [placement.retry_seconds * 3**attempt for attempt in range(retries)]
    run_task = stage_task.fn
    if FlowRunContext.get() is not None:
        run_task = stage_task.with_options(retries=retries, retry_delay_seconds=delays)
        # Prefect numbers the runs of each task key, which is not safe with two threads.
        run_task.task_key = f"{run_task.task_key}-{label}"
    upcoming = tuple(
        stage_call(recipe, name, following, {})
        for name, following in next_configs.items()
        if name not in placement.pools
    )
    with TagsContext(current_tags=set()):
        outcome = run_task(call, placement, upcoming, labels_of(recipe, stage, iteration))
    CALLED.num_made += not outcome.cached
    log.info("%s", describe(label, outcome))
    # Training is never repeated unasked to restore expired files.
    if stage != "optimize":
        about = {"label": f"{label}, again", "into": into, "iteration": iteration}
        run.again[outcome.ref] = partial(
            perform, recipe, stage, config, refs, readable=True, **about
        )
    return outcome


def _is_done(call: StageCall) -> bool:
    """True if this call needs to read no input: it is finished, or all its inputs exist."""
    store = Store(call.store)
    refs: list[str] = []
    for named in call.refs.values():
        refs += named if isinstance(named, list) else [named]
    if all(store.exists(parse(ref)) for ref in refs):
        return True
    outcome = find(call.runner_call, expired=True)
    return outcome is not None and (call.expired or store.exists(parse(outcome.ref)))


def _readable(recipe: Recipe, ref: str | list[str]) -> str | list[str]:
    """Return a reference to the version with its files, restored from the trash or made again.

    Raises LineageError if neither is possible.
    """
    if isinstance(ref, list):
        return [_readable(recipe, one) for one in ref]
    store = Store(recipe.store)
    if store.exists(parse(ref)):
        return ref
    with suppress(LineageError):
        restore(store, ref)
        log.info("%-22s %s  out of the trash", "brought back", ref)
        return ref
    run = _RUN.get()
    if run is None or ref not in run.again:
        try:
            return str(store.resolve(ref))
        except LineageError as error:
            error.next = "quiver run RECIPE --from optimize"
            raise
    return run.again[ref]().ref


def labels_of(
    recipe: Recipe, stage: str | None = None, iteration: int | None = None
) -> tuple[str, ...]:
    """Return the tags of a run: `run:arith`, `stage:generate`, `iteration:3`."""
    labels = {"run": recipe.run, "stage": stage, "iteration": iteration}
    return tuple(f"{key}:{label}" for key, label in labels.items() if label is not None)


@contextmanager
def tagged(recipe: Recipe, *, expired: bool = False) -> Iterator[None]:
    """Tag the calls inside with the run, treat them as one run, and end waiting processes
    afterwards.

    `check_stages` checks each stage once within it. If `expired` is true, finished versions whose
    files expired count as done.
    """
    token = _RUN.set(_Run(expired))
    try:
        with tags(*labels_of(recipe)):
            yield
    finally:
        end_waiting()
        _RUN.reset(token)


@contextmanager
def only_looking() -> Iterator[None]:
    """Make nothing inside; raise NotFinished at the first stage that is not done."""
    token = _RUN.set(_Run(expired=True, only_look=True))
    try:
        yield
    finally:
        _RUN.reset(token)


def check_stages(
    recipe: Recipe, configs: Mapping[str, Config], before: StageCall, prompts: str | None = None
) -> None:
    """Raise ConfigError if one of the stages in `configs` cannot run, e.g. because a scorer is
    missing.

    The check comes before the call `before`, and is skipped if that call is finished. Each stage is
    checked once per run, and again for prompts with other columns or other assistant starts.
    Without `prompts`, pass only stages that need none; they are not checked again.
    """
    run = _RUN.get() or _Run()
    if run.only_look or find(before.runner_call, expired=run.expired) is not None:
        return
    columns: tuple[str, ...] = ()
    version = None
    form = ""
    if prompts is not None:
        version = Store(recipe.store).open(_readable(recipe, prompts))
        columns = tuple(column.name for column in version.table().schema.field("columns").type)
        form = digest([columns, version.manifest.metrics.get("assistant_starts")])
    for stage, config in configs.items():
        if run.checked.isdisjoint({(stage, ""), (stage, form)}):
            try:
                load(stage).check(config, (*columns, *recipe.offered_columns), version)
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
