"""One Prefect task for every stage. It passes references and small numbers, never data; its cache
is the store, not Prefect's.

The task is called directly, never submitted, so that a cancelled flow ends the stage at once. Its
name tells run, stage and iteration; flow runs bear them as tags, a task run none, since Prefect
asks its server for a slot for each tag of a task, before and after it. A task is tried again, with
growing pauses, where the error's code says that this can help.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from prefect import Task, tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.context import TagsContext

from quiver.schemas.errors import QuiverError
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.runner import Call, Outcome, find
from quiver.stages.common.store import Store
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.reward.stage import check_functions

from . import logs
from .ahead import is_ahead, is_stopped
from .pages import publish
from .placement import GivenUp, Place, next_stages, place_of, run_when_free
from .progress import progress
from .recipe import Placement, Recipe

WORTH_RETRYING = {"E-REMOTE", "E-RESOURCE"}
logs.attach()
log = logging.getLogger("quiver")


def worth_retrying(task: Task, run: TaskRun, state: State) -> bool:
    """Whether the error may be gone in a while: a server, memory or a process lost. Never for bad
    input."""
    error = state.data
    again = (
        isinstance(error, QuiverError)
        and error.code in WORTH_RETRYING
        and not isinstance(error, GivenUp)
    )
    if again:
        log.warning("%s: %s; it is tried again soon", error.object, error.message)
    return again


@task(
    name="stage",
    task_run_name="{name}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retry_condition_fn=worth_retrying,
)
def stage_task(name: str, call: Call, where: Place, labels: tuple[str, ...]) -> Outcome:
    """Run one stage and return its reference with a few numbers; "already done" when a finished
    version bears its run_key."""
    with progress(call, logging.getLogger(f"quiver.{call.stage}").info) as on_line:
        outcome = run_when_free(where, call, name, tags=labels, on_line=on_line, stopped=is_stopped)
    publish(call, outcome)
    return replace(
        outcome, metrics={key: value for key, value in outcome.metrics.items() if _is_small(value)}
    )


def perform(
    recipe: Recipe,
    label: str,
    stage: str,
    config: Any,
    refs: dict[str, str | list[str]],
    into: str,
    force: bool,
    iteration: int | None = None,
    *,
    next_configs: Mapping[str, Config] = MappingProxyType({}),
) -> Outcome:
    """Run `stage` of `recipe` as a task, where and as long as [placement] says; the line that a
    person reads is logged.

    `label` says stage and iteration; of the metrics only single numbers and words come back, the
    version has them all. `next_configs`: of the stages that come next; their processes import what
    they need while this one runs.
    """
    call = Call(stage, config.model_dump(mode="json"), str(recipe.store), refs, into, force)
    labels = labels_of(recipe, stage, iteration)
    where = replace(place_of(recipe, stage), prewarmed=next_stages(recipe, next_configs))
    with TagsContext(current_tags=set()):
        outcome = _retrying(recipe.placement, force)(f"{recipe.run} · {label}", call, where, labels)
    log.info("%s", describe(label, outcome))
    return outcome


def labels_of(
    recipe: Recipe, stage: str | None = None, iteration: int | None = None
) -> tuple[str, ...]:
    """The tags of a run: `run:arith`, `stage:generate`, `iteration:3`."""
    given = {"run": recipe.run, "stage": stage, "iteration": iteration}
    return tuple(f"{key}:{value}" for key, value in given.items() if value is not None)


def tagged(recipe: Recipe) -> AbstractContextManager[set[str]]:
    """What is called inside bears the run's tags."""
    return tags(*labels_of(recipe))


def _retrying(place: Placement, force: bool) -> Callable[..., Outcome]:
    """The task with the recipe's retries; a forced one has none, since what it made before it
    failed would be made again. Work beside the flow's own has a key of its own: Prefect numbers the
    runs of a key, and does not expect two threads."""
    retries = 0 if force else place.retries
    delays = [place.retry_seconds * 3**attempt for attempt in range(retries)]
    made = stage_task.with_options(retries=retries, retry_delay_seconds=delays)
    if is_ahead():
        made.task_key = f"{made.task_key}-ahead"
    return made


def _is_small(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, int | float)
        or (isinstance(value, str) and len(value) <= 100)
    )


def check_rewards(
    recipe: Recipe,
    prompts: str,
    policy: str,
    config: GenerateConfig,
    into: str,
    force: bool = False,
) -> None:
    """ConfigError when something that scores is missing, or can not score `prompts`: told before
    the engine starts, so nothing is looked at where `policy` has answered them already."""
    refs = {"prompts": prompts, "policy": policy}
    call = Call("generate", config.model_dump(mode="json"), recipe.store, refs, into, force)
    if find(call) is not None:
        return
    version = Store(recipe.store).open(prompts)
    columns = version.table().schema.field("columns").type
    check_functions(recipe.reward, [field.name for field in columns], version)


def describe(label: str, outcome: Outcome) -> str:
    """One line of what a stage did: label, reference, rows, seconds, and its most telling
    number."""
    if outcome.cached:
        return f"{label:<22} {outcome.ref}  already done"
    telling = {
        "tokens_per_second": "{:.0f} tokens/s",
        "reward_mean": "reward {:.3f}",
        "score": "score {:.3f}",
        "loss": "loss {:.4f}",
    }
    extra = [
        form.format(outcome.metrics[key])
        for key, form in telling.items()
        if outcome.metrics.get(key) is not None
    ]
    missing = outcome.metrics.get("reward_null") or outcome.metrics.get("null")
    extra += [f"{missing} not scored"] if missing else []
    rows = [f"{outcome.rows} rows"] if outcome.rows else []
    return f"{label:<22} {outcome.ref}  " + "  ".join([*rows, f"{outcome.seconds:.1f} s", *extra])
