"""Each stage as a flow of its own, for Prefect's form and for deployments: what `quiver STAGE
RECIPE` does in a shell.

The work is done by `quiver.flows.rerun`: a reference that is left out is found there (`find_refs`),
and the same call again returns the finished version. `rerun` does any of the stages by its name;
`evaluation` measures several policies.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

from prefect import flow

from quiver.stages.common.store import Store

from .evaluation import measure, numbers, require_held_out
from .placement import check_placement
from .recipe import Recipe
from .rerun import References
from .rerun import rerun as rerun_stage
from .tasks import perform, tagged

StageName = Literal["prompt", "generate", "reward", "logprobs", "optimize", "evaluate"]


@flow(name="prompt", flow_run_name="{recipe.run} · prompt {iteration}", persist_result=False)
def prompt(
    recipe: Recipe, policy: str | None = None, iteration: int = 1, force: bool = False
) -> dict[str, Any]:
    """Render the source's rows to token ids: a new prompts version.

    Args:
        recipe: The recipe whose [data] and [prompt] are meant.
        policy: Whose tokenizer renders. None: the run's latest policy, imported where there is
            none.
        iteration: Whose rows are meant, counted from 1.
        force: Do it anew, even where a finished version exists.
    """
    return _rerun(recipe, "prompt", {"policy": policy}, iteration, force)


@flow(name="generate", flow_run_name="{recipe.run} · generate {iteration}", persist_result=False)
def generate(
    recipe: Recipe,
    prompts: str | None = None,
    policy: str | None = None,
    iteration: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Sample completions: a new rollouts version.

    Args:
        recipe: The recipe whose [generate] is meant.
        prompts: What is answered. None: the run's latest prompts.
        policy: Who answers. None: the run's latest policy.
        iteration: Whose seeds are meant, counted from 1.
        force: Do it anew, even where a finished version exists.
    """
    return _rerun(recipe, "generate", {"prompts": prompts, "policy": policy}, iteration, force)


@flow(name="reward", flow_run_name="{recipe.run} · reward {iteration}", persist_result=False)
def reward(
    recipe: Recipe,
    rollouts: str | None = None,
    retry: str | None = None,
    iteration: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Score saved rollouts: a new rewards version.

    Args:
        recipe: The recipe whose [reward] is meant.
        rollouts: What is scored. None: the rollouts of `retry`, or the run's latest.
        retry: A rewards version of which only the rows without a reward are scored again. None:
            every row is scored.
        iteration: What the run is called by; it decides nothing.
        force: Do it anew, even where a finished version exists.
    """
    return _rerun(recipe, "reward", {"rollouts": rollouts, "retry": retry}, iteration, force)


@flow(name="logprobs", flow_run_name="{recipe.run} · logprobs {iteration}", persist_result=False)
def logprobs(
    recipe: Recipe,
    rollouts: str | None = None,
    policy: str | None = None,
    iteration: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Score saved completions again, under a reference: a new logprobs version.

    Args:
        recipe: The recipe whose [logprobs] is meant.
        rollouts: What is scored. None: the run's latest rollouts.
        policy: The reference. None: policy@0.
        iteration: What the run is called by; it decides nothing.
        force: Do it anew, even where a finished version exists.
    """
    return _rerun(recipe, "logprobs", {"rollouts": rollouts, "policy": policy}, iteration, force)


@flow(name="optimize", flow_run_name="{recipe.run} · optimize {iteration}", persist_result=False)
def optimize(
    recipe: Recipe,
    policy: str | None = None,
    rollouts: list[str] | None = None,
    rewards: list[str] | None = None,
    iteration: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Update the policy on saved rollouts: the next policy.

    Args:
        recipe: The recipe whose [optimize] is meant.
        policy: Where to start. None: the newest of the policies that sampled the rollouts.
        rollouts: What is trained on; several are a replay. None: those of `rewards`, or the run's
            latest.
        rewards: Of each rollouts version, in any order. None: those that the recipe's [reward]
            gave.
        iteration: What the run is called by; it decides nothing.
        force: Do it anew, even where a finished version exists.
    """
    references = {"policy": policy, "rollouts": rollouts, "rewards": rewards}
    return _rerun(recipe, "optimize", references, iteration, force)


@flow(name="evaluate", flow_run_name="{recipe.run} · evaluate {iteration}", persist_result=False)
def evaluate(
    recipe: Recipe, policy: str | None = None, iteration: int = 1, force: bool = False
) -> dict[str, Any]:
    """Measure a policy on the held-out rows: a new evaluations version.

    Args:
        recipe: The recipe whose [data.held_out] and [evaluate] are meant.
        policy: Who is measured. None: the run's latest policy.
        iteration: What the run is called by; it decides nothing.
        force: Do it anew, even where a finished version exists.
    """
    return _rerun(recipe, "evaluate", {"policy": policy}, iteration, force)


@flow(name="rerun", flow_run_name="{recipe.run} · {stage} {iteration}", persist_result=False)
def rerun(
    recipe: Recipe,
    stage: StageName,
    references: dict[str, str | list[str]] | None = None,
    iteration: int = 1,
    force: bool = False,
) -> dict[str, Any]:
    """Any one stage on saved versions, without the rest of the chain.

    Args:
        recipe: The recipe whose sections are meant.
        stage: What is done.
        references: Versions by role (prompts, policy, rollouts, rewards, retry), as the stage takes
            them; others are found.
        iteration: Whose prompts and seeds are meant, counted from 1.
        force: Do it anew, even where a finished version exists.
    """
    return _rerun(recipe, stage, references or {}, iteration, force)


@flow(name="evaluation", flow_run_name="{recipe.run} · evaluation", persist_result=False)
def evaluation(recipe: Recipe, policies: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure policies on the same held-out rows with the same seeds, so that their scores are
    paired.

    Args:
        recipe: The recipe whose held-out rows, sampling and rewards are meant.
        policies: References of the policies, in any run. None: all of the recipe's run.

    Returns:
        One row a policy: its reference, score, standard error, number of rows, and the evaluation's
        reference.
    """
    require_held_out(recipe)
    check_placement(recipe)
    store = Store(recipe.store)
    refs = [store.resolve(ref, recipe.run) for ref in policies or store.refs(recipe.run, "policy")]
    rows = []
    with tagged(recipe):
        for ref in refs:
            outcome = measure(recipe, str(ref), ref.version)
            rows.append({"policy": str(ref), **numbers(outcome)})
    return rows


def _rerun(
    recipe: Recipe, stage: str, references: References, iteration: int, force: bool
) -> dict[str, Any]:
    """The outcome of one stage, as `quiver STAGE --json` prints it; of the metrics only single
    numbers and words."""
    with tagged(recipe):
        return asdict(rerun_stage(recipe, stage, references, iteration, force, perform))
