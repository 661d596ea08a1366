"""The main flow: prompts → rollouts → rewards → the next policy, again and again, measured before and after.

Only references travel between tasks. A run that is started again walks the same way: what is finished is found in the store, and
the first unfinished stage goes on at its first unfinished shard.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from stages.common.process import Outcome
from stages.logprobs.average import Config as AverageConfig

from .evaluation import measure
from .recipe import Recipe
from .tasks import check_rewards, perform

STAGES = ("prompt", "generate", "reward", "logprobs", "optimize", "evaluate")


@flow(name="post-train", flow_run_name="post-train {recipe.run}", persist_result=False)
def post_train(recipe: Recipe, first_forced: str | None = None) -> dict[str, Any]:
    """Improve the recipe's policy `iterations` times.

    `first_forced` names a stage: it and those after it are done anew, even where a finished version exists. Returns what
    `quiver run --json` prints: the run, and for each iteration its references, mean reward, evaluation and seconds by stage.
    """
    forced = set(STAGES[STAGES.index(first_forced) :]) if first_forced else set()
    recipe.optimize_config().resolved()  # a user's own algorithm is told what is wrong with it before anything is made
    policy = perform(recipe, "import policy", "policy", recipe.policy, {}, recipe.run, False).ref
    baseline = measure(recipe, policy, 0, forced)
    iterations, policies, reference = [], [policy], None
    for iteration in range(1, recipe.iterations + 1):
        earlier = iterations[: -recipe.optimize.replay - 1 : -1]  # newest first
        reference = _reference(recipe, policies, iteration, reference)
        done = improve(recipe, policy, reference, iteration, forced, earlier)
        policy = done["policy"]
        policies.append(policy)
        every = recipe.evaluate.every
        if iteration == recipe.iterations or (every and iteration % every == 0):
            done |= _with_evaluation(done, measure(recipe, policy, iteration, forced), baseline)
        iterations.append(done)
    return {"run": recipe.run, "baseline": _numbers(baseline), "iterations": iterations}


def improve(
    recipe: Recipe, policy: str, reference: str | None, iteration: int, forced: set[str], earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """One iteration, from `policy` to the next; the KL term, where there is one, holds on to `reference`.

    What `earlier` iterations (as this function returned them) sampled is trained on again, beside this one's.
    """

    def stage(name: str, config: Any, **refs: str | list[str]) -> Outcome:
        return perform(recipe, f"{name} {iteration}/{recipe.iterations}", name, config, refs, recipe.run, name in forced)

    prompts = stage("prompt", recipe.prompt_config(iteration), policy=policy)
    check_rewards(recipe, prompts.ref)
    rollouts = stage("generate", recipe.generate_config(iteration), prompts=prompts.ref, policy=policy)
    rewards = stage("reward", recipe.reward, rollouts=rollouts.ref)
    scored = {}
    if reference:
        scored["ref"] = stage("logprobs", recipe.logprobs_config("ref"), rollouts=rollouts.ref, policy=reference)
    if recipe.logprobs.prox:
        scored["prox"] = stage("logprobs", recipe.logprobs_config("prox"), rollouts=rollouts.ref, policy=policy)
    extra = {f"{role}_logprobs": outcome.ref for role, outcome in scored.items()}
    own = {"rollouts": rollouts.ref, "rewards": rewards.ref, **extra}
    replayed = [_replayed(recipe, done, reference) for done in earlier]
    refs = {role: [ref, *(each[role] for each in replayed)] if replayed else ref for role, ref in own.items()}
    updated = stage("optimize", recipe.optimize_config(), policy=policy, **refs)
    seconds = {"prompt": prompts, "generate": rollouts, "reward": rewards, "optimize": updated}
    seconds |= {f"logprobs {role}": outcome for role, outcome in scored.items()}
    return {
        "iteration": iteration,
        "prompts": prompts.ref,
        **own,
        "policy": updated.ref,
        "reward_mean": rewards.metrics.get("reward_mean"),
        "evaluation": None,
        "seconds": {name: outcome.seconds for name, outcome in seconds.items()},
    }


def _replayed(recipe: Recipe, done: dict[str, Any], reference: str | None) -> dict[str, Any]:
    """What iteration `done` sampled, as optimize takes it; scored under the present reference where that has moved since."""
    if reference is None:
        return done
    config, refs = recipe.logprobs_config("ref"), {"rollouts": done["rollouts"], "policy": reference}
    label = f"logprobs of {done['iteration']}/{recipe.iterations}"
    return {**done, "ref_logprobs": perform(recipe, label, "logprobs", config, refs, recipe.run, False).ref}


def _reference(recipe: Recipe, policies: list[str], iteration: int, before: str | None) -> str | None:
    """What the KL term of this iteration holds on to: one of `policies` (the starting policy of every iteration so far), or their
    moving average, made of that of the iteration `before`. None where there is no such term."""
    rule = recipe.reference
    if recipe.optimize.kl_coef == 0:
        return None
    if rule.rule != "ema" or before is None:
        return policies[rule.start(iteration) - 1]
    refs, label = {"reference": before, "policy": policies[-1]}, f"reference {iteration}/{recipe.iterations}"
    return perform(recipe, label, "average", AverageConfig(rate=rule.rate), refs, f"{recipe.run}.ref", False).ref


def _with_evaluation(done: dict[str, Any], evaluation: Outcome | None, baseline: Outcome | None) -> dict[str, Any]:
    if evaluation is None:
        return {}
    seconds = {**done["seconds"], "evaluate": evaluation.seconds}
    return {"evaluation": {**_numbers(evaluation), "baseline": _numbers(baseline)}, "seconds": seconds}


def _numbers(evaluation: Outcome | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {**{key: evaluation.metrics[key] for key in ("score", "stderr", "n")}, "ref": evaluation.ref}
