"""One Prefect task for every stage. It passes references and small numbers, never data; its cache is the store, not Prefect's.

The stage runs as a child process, called from the task in the main thread, so that a cancelled flow ends it at once.
"""

from __future__ import annotations

import logging
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from stages.common.process import Call, Outcome, run_stage
from stages.common.store import Store
from stages.reward.stage import check_functions

from .artifacts import publish
from .recipe import Recipe

log = logging.getLogger("quiver")


@task(name="stage", task_run_name="{label}", cache_policy=NO_CACHE, persist_result=False)
def stage_task(label: str, call: Call, python: str | None, timeout: float | None, online: bool) -> Outcome:
    """Run one stage and return its reference with a few numbers; "already done" when a finished version bears its run_key."""
    on_line = logging.getLogger(f"quiver.{call.stage}").info
    outcome = run_stage(call, python=python, timeout=timeout, online=online, on_line=on_line)
    publish(call, outcome)
    return outcome


def perform(
    recipe: Recipe, label: str, stage: str, config: Any, refs: dict[str, str | list[str]], into: str, force: bool
) -> Outcome:
    """Run `stage` of `recipe` as a task, where and as long as [placement] says; the line that a person reads is logged."""
    call = Call(stage, config.model_dump(mode="json"), str(recipe.store), refs, into, force)
    place = recipe.placement
    outcome = stage_task(label, call, place.python.get(stage), place.timeout_seconds.get(stage), recipe.online)
    log.info("%s", describe(label, outcome))
    return outcome


def check_rewards(recipe: Recipe, prompts: str) -> None:
    """ConfigError when something that scores is missing, or can not score `prompts`: told before the engine starts."""
    version = Store(recipe.store).open(prompts)
    columns = version.table().schema.field("columns").type
    check_functions(recipe.reward, [field.name for field in columns], version)


def describe(label: str, outcome: Outcome) -> str:
    """One line of what a stage did: label, reference, rows, seconds, and its most telling number."""
    if outcome.cached:
        return f"{label:<22} {outcome.ref}  already done"
    telling = {
        "tokens_per_second": "{:.0f} tokens/s",
        "reward_mean": "reward {:.3f}",
        "score": "score {:.3f}",
        "loss": "loss {:.4f}",
    }
    extra = [form.format(outcome.metrics[key]) for key, form in telling.items() if outcome.metrics.get(key) is not None]
    rows = [f"{outcome.rows} rows"] if outcome.rows else []
    return f"{label:<22} {outcome.ref}  " + "  ".join([*rows, f"{outcome.seconds:.1f} s", *extra])
