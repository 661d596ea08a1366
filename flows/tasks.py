"""One Prefect task for every stage. It passes references and small numbers, never data; its cache
is the store, not Prefect's.

The task is called directly, never submitted, so that a cancelled flow ends the stage at once. Its
name tells run, stage and iteration; flow runs bear them as tags, a task run none, since Prefect
asks its server for a slot for each tag of a task, before and after it. A task is tried again, with
growing pauses, where the error's code says that this can help.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType

from prefect import Task, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TagsContext

from quiver.schemas.errors import QuiverError
from quiver.schemas.manifest import digest
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.prewarm import end_prewarmed
from quiver.stages.common.runtime.runner import Outcome, find
from quiver.stages.common.runtime.stage import Refs, load
from quiver.stages.common.store import Store

from . import logs  # noqa: F401  lines go to Prefect's pages
from .dispatch import run_when_free
from .pages import publish
from .placement import GivenUp, StageCall, stage_call
from .progress import progress
from .recipe import Placement, Recipe

WORTH_RETRYING = {"E-REMOTE", "E-RESOURCE"}
_LONGEST_WORD = 100
log = logging.getLogger("quiver")
_CHECKED: ContextVar[set[tuple[str, str]] | None] = ContextVar("quiver_checked", default=None)
"""Stages that were checked in this run, with the form of the prompts. None: outside a run."""


def worth_retrying(task: Task, run: TaskRun, state: State) -> bool:
    """Whether the error may be gone in a while: a server, memory or a process lost. Never for bad
    input."""
    error = state.data
    if not isinstance(error, QuiverError) or isinstance(error, GivenUp):
        return False
    if error.code not in WORTH_RETRYING:
        return False
    log.warning("%s: %s; it is tried again soon", error.object, error.message)
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
    """Run one stage and return its reference with a few numbers; "already done" when a finished
    version bears its run_key. Of the metrics only single numbers and words come back."""
    with progress(call.runner_call, logging.getLogger(f"quiver.{call.stage}").info) as on_line:
        outcome = run_when_free(call, placement, upcoming=upcoming, tags=labels, on_line=on_line)
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
    next_configs: Mapping[str, Config] = MappingProxyType({}),
) -> Outcome:
    """Run `stage` of `recipe` as a task, where and as long as [placement] says; the line that a
    person reads is logged.

    Args:
        recipe: Whose run, store and placement are meant.
        stage: Its name.
        config: Its config.
        refs: References by role.
        label: What logs call it. Default: stage and iteration, `generate 2/5`.
        into: Run that the version belongs to. None: the recipe's.
        force: Do it anew, even where a finished version exists. A forced stage is not retried,
            since what it made before it failed would be made again.
        iteration: What the task is tagged with.
        next_configs: Of the stages that come next; their processes import what they need while this
            one runs.
    """
    label = label or f"{stage} {iteration}/{recipe.iterations}"
    call = stage_call(recipe, stage, config, refs, label=label, into=into, force=force)
    placement = recipe.placement
    retries = 0 if force else placement.retries
    delays = [placement.retry_seconds * 3**attempt for attempt in range(retries)]
    run_task = stage_task.with_options(retries=retries, retry_delay_seconds=delays)
    # Prefect numbers the runs of a key, and does not expect two threads
    run_task.task_key = f"{run_task.task_key}-{label}"
    upcoming = tuple(
        stage_call(recipe, name, following, {})
        for name, following in next_configs.items()
        if name not in placement.pools
    )
    with TagsContext(current_tags=set()):
        outcome = run_task(call, placement, upcoming, labels_of(recipe, stage, iteration))
    log.info("%s", describe(label, outcome))
    return outcome


def labels_of(
    recipe: Recipe, stage: str | None = None, iteration: int | None = None
) -> tuple[str, ...]:
    """The tags of a run: `run:arith`, `stage:generate`, `iteration:3`."""
    labels = {"run": recipe.run, "stage": stage, "iteration": iteration}
    return tuple(f"{key}:{label}" for key, label in labels.items() if label is not None)


@contextmanager
def tagged(recipe: Recipe) -> Iterator[None]:
    """What is called inside bears the run's tags, is one run to `check_stages`, and leaves no
    prewarmed process behind."""
    token = _CHECKED.set(set())
    try:
        with tags(*labels_of(recipe)):
            yield
    finally:
        end_prewarmed()
        _CHECKED.reset(token)


def check_stages(
    recipe: Recipe, configs: Mapping[str, Config], before: StageCall, prompts: str | None = None
) -> None:
    """ConfigError where one of the stages in `configs` could not do its part: something that scores
    is missing, for example.

    It is told before the call `before` is made, so nothing is looked at where that is finished; and
    once a run. Prompts of other columns, or whose answers begin otherwise, are looked at once more.
    Without `prompts` only such stages are asked that need none.
    """
    if find(before.runner_call) is not None:
        return
    checked = _CHECKED.get()
    columns: tuple[str, ...] = ()
    version = None
    form = ""
    if prompts is not None:
        version = Store(recipe.store).open(prompts)
        columns = tuple(column.name for column in version.table().schema.field("columns").type)
        form = digest([columns, version.manifest.metrics.get("assistant_starts")])
    for stage, config in configs.items():
        if checked is None or checked.isdisjoint({(stage, ""), (stage, form)}):
            try:
                load(stage).check(config, columns, version)
            except QuiverError as error:
                if version is not None:
                    sources = f"{version.ref} and what it was made of"
                    error.state = f"{sources} are kept; nothing was generated."
                raise
        if checked is not None:
            checked.add((stage, form))


def describe(label: str, outcome: Outcome) -> str:
    """One line of what a stage did: label, reference, rows, seconds, and its most telling
    number."""
    if outcome.cached:
        return f"{label:<22} {outcome.ref}  already done"
    formats = {
        "tokens_per_second": "{:.0f} tokens/s",
        "reward_mean": "reward {:.3f}",
        "score": "score {:.3f}",
        "loss": "loss {:.4f}",
    }
    words = [f"{outcome.rows} rows"] if outcome.rows else []
    words.append(f"{outcome.seconds:.1f} s")
    for name, form in formats.items():
        metric = outcome.metrics.get(name)
        if metric is not None:
            words.append(form.format(metric))
    missing = outcome.metrics.get("reward_null") or outcome.metrics.get("null")
    if missing:
        words.append(f"{missing} not scored")
    return f"{label:<22} {outcome.ref}  " + "  ".join(words)
