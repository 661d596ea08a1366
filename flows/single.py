"""Flows for one stage, or a measurement of several policies, for Prefect's form and deployments.

The flow `rerun` calls `quiver.flows.rerun`, like `quiver STAGE RECIPE` in a shell. Missing
references are found there (`find_refs`), and repeating a call returns the finished version.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from prefect import flow

from quiver.stages import CHAIN
from quiver.stages.common.store import Store

from .evaluation import measure, numbers
from .placement import check_placement
from .recipe import Recipe
from .rerun import rerun as rerun_stage
from .tasks import as_tasks


@flow(name="rerun", flow_run_name="{recipe.run} · {stage} {iteration}", persist_result=False)
def rerun(
    recipe: Recipe,
    stage: Literal[CHAIN],
    references: dict[str, str | list[str]] | None = None,
    iteration: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Run one stage on saved versions, without the rest of the chain.

    Args:
        recipe: The recipe whose sections apply.
        stage: The stage to run.
        references: Versions by role (prompts, policy, rollouts, rewards, retry) that the stage
            takes; others are found.
        iteration: Iteration that gives the prompts and seeds, counted from 1.
        force: Run it again, even if a finished version exists.

    Returns:
        The object that `quiver STAGE --json` prints; of the metrics only single numbers and words.
    """
    with as_tasks(recipe):
        return asdict(rerun_stage(recipe, stage, references or {}, iteration, force))


@flow(name="evaluation", flow_run_name="{recipe.run} · evaluation", persist_result=False)
def evaluation(recipe: Recipe, policies: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure policies on the same held-out rows with the same seeds, so that their scores are
    paired.

    Args:
        recipe: The recipe whose held-out rows, sampling and rewards apply.
        policies: References of the policies, in any run. Default: all of the recipe's run.

    Returns:
        One row per policy: its reference, score, standard error, number of rows, and the
            evaluation's reference.
    """
    recipe.data.require_held_out()
    check_placement(recipe)
    store = Store(recipe.store)
    refs = [store.resolve(ref, recipe.run) for ref in policies or store.refs(recipe.run, "policy")]
    recipe = recipe.held_out_resolved()
    rows = []
    with as_tasks(recipe):
        for ref in refs:
            outcome = measure(recipe, str(ref), ref.version)
            rows.append({"policy": str(ref), **numbers(outcome)})
    return rows
