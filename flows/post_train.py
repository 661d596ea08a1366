"""The main flow: prompts → rollouts → rewards → the next policy, again and again, measured before
and after.

Only references travel between tasks. A run that is started again walks the same way: what is
finished is found in the store, and the first unfinished stage goes on at its first unfinished
shard.

Iteration k makes policy@k; policy@0 is the base. With `overlap = 0` its rollouts are sampled by
policy@k-1, which it improves:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · sample 2 (policy@1) · optimize 2 (policy@1 →
    2) · …

With `overlap = 1` the rollouts of iteration k+1 are sampled and scored while iteration k optimizes,
by the policy that it starts from; so those of iteration 1 are on-policy, and those of every later
one are by policy@k-2, one step old:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · optimize 2 (policy@1 → 2) · optimize 3
    (policy@2 → 3)
                        · sample 2 (policy@0)       · sample 3 (policy@1)       · …

The losses correct it, since each row carries the logprob that it was sampled with. Seeds follow
from the iteration, and versions of a kind are made one after another; so numbers, references and
lineage are the same however often the flow was interrupted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from prefect import flow

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.prewarm import end_prewarmed
from quiver.stages.common.runtime.runner import Outcome
from quiver.stages.logprobs.average import Config as AverageConfig

from .ahead import Ahead
from .evaluation import measure, numbers
from .pages import link_report
from .pages.iterations import Curve
from .placement import check_placement
from .recipe import Recipe
from .tasks import check_rewards, perform, tagged

STAGES = ("prompt", "generate", "reward", "logprobs", "optimize", "evaluate")


@flow(name="post-train", flow_run_name="{recipe.run} · post-train", persist_result=False)
def post_train(recipe: Recipe, first_forced: str | None = None) -> dict[str, Any]:
    """Improve the recipe's policy `iterations` times, measured on held-out rows before and after.

    Args:
        recipe: The whole recipe, as a TOML file has it.
        first_forced: A stage (prompt, generate, reward, logprobs, optimize or evaluate): it and
            those after it are done anew, even where a finished version exists.

    Returns:
        What `quiver run --json` prints: the run, and for each iteration its references, mean
        reward, evaluation and seconds by stage.
    """
    if first_forced is not None and first_forced not in STAGES:
        what = f"expected one of {', '.join(STAGES)}"
        raise ConfigError(
            f"first_forced {printable(first_forced)}", what, next="name a stage, or leave it out"
        )
    forced = set(STAGES[STAGES.index(first_forced) :]) if first_forced else set()
    # a user's own algorithm is told what is wrong with it before anything is made
    recipe.optimize_config().resolved()
    check_placement(recipe)
    try:
        with tagged(recipe):
            return _improve(recipe.resolved(), forced)
    finally:
        end_prewarmed()


def _improve(recipe: Recipe, forced: set[str]) -> dict[str, Any]:
    policy = perform(recipe, "import policy", "policy", recipe.policy, {}, recipe.run, False).ref
    prompts = ask(
        recipe, policy, 1, forced
    )  # before the baseline: a missing source is told before anything is generated
    baseline = measure(recipe, policy, 0, forced)
    iterations, policies, reference, sampled, curve = [], [policy], None, None, Curve(recipe.run)
    for iteration in range(1, recipe.iterations + 1):
        sampled = sampled or sample(
            recipe, policies[-1], iteration, forced, prompts if iteration == 1 else None
        )
        earlier = iterations[: -recipe.optimize.replay - 1 : -1]  # newest first
        reference = choose_reference(recipe, policies, iteration, reference)
        with _ahead(recipe, policies[-1], iteration, forced) as ahead:
            done = update(recipe, policies[-1], reference, sampled, forced, earlier)
            policies.append(done["policy"])
            if recipe.is_measured(iteration):
                done |= _with_evaluation(
                    done, measure(recipe, done["policy"], iteration, forced), baseline
                )
            iterations.append(done)
            curve.show(iterations, numbers(baseline), last=iteration == recipe.iterations)
            sampled = ahead.result() if ahead else None
    link_report(recipe)
    return {"run": recipe.run, "baseline": numbers(baseline), "iterations": iterations}


def _ahead(recipe: Recipe, policy: str, iteration: int, forced: set[str]) -> Any:
    """The next iteration's sampling, begun now by `policy`, where the recipe overlaps; else
    nothing."""
    if not recipe.overlap or iteration == recipe.iterations:
        return nullcontext()
    return Ahead(lambda: sample(recipe, policy, iteration + 1, forced))


def ask(recipe: Recipe, policy: str, iteration: int, forced: set[str]) -> Outcome:
    """The prompts of one iteration, rendered for `policy`; ConfigError when the rewards could not
    score them."""
    prompts = _stage(
        recipe, "prompt", iteration, forced, recipe.prompt_config(iteration), policy=policy
    )
    check_rewards(
        recipe,
        prompts.ref,
        policy,
        recipe.generate_config(iteration),
        recipe.run,
        "generate" in forced,
    )
    return prompts


def sample(
    recipe: Recipe, policy: str, iteration: int, forced: set[str], prompts: Outcome | None = None
) -> dict[str, Any]:
    """What iteration `iteration` learns from, by `policy`: references of prompts, rollouts, rewards
    and, where the recipe wants them, proximal logprobs; with the mean reward and the seconds of
    each stage."""
    prompts = prompts or ask(recipe, policy, iteration, forced)
    config = recipe.generate_config(iteration)
    next_configs = {} if recipe.overlap else {"optimize": recipe.optimize_config()}
    rollouts = _stage(
        recipe,
        "generate",
        iteration,
        forced,
        config,
        next_configs=next_configs,
        prompts=prompts.ref,
        policy=policy,
    )
    rewards = _stage(recipe, "reward", iteration, forced, recipe.reward, rollouts=rollouts.ref)
    made = {"prompt": prompts, "generate": rollouts, "reward": rewards}
    extra = {}
    if recipe.logprobs.prox:
        config, refs = recipe.logprobs_config("prox"), {"rollouts": rollouts.ref, "policy": policy}
        made["logprobs prox"] = _stage(recipe, "logprobs", iteration, forced, config, **refs)
        extra["prox_logprobs"] = made["logprobs prox"].ref
    return {
        "iteration": iteration,
        "prompts": prompts.ref,
        "rollouts": rollouts.ref,
        "rewards": rewards.ref,
        **extra,
        "reward_mean": rewards.metrics.get("reward_mean"),
        "seconds": {name: outcome.seconds for name, outcome in made.items()},
    }


def improve(
    recipe: Recipe,
    policy: str,
    reference: str | None,
    iteration: int,
    forced: set[str],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    """One iteration by itself, on-policy: `sample`, then `update`."""
    return update(
        recipe, policy, reference, sample(recipe, policy, iteration, forced), forced, earlier
    )


def update(
    recipe: Recipe,
    policy: str,
    reference: str | None,
    sampled: dict[str, Any],
    forced: set[str],
    earlier: list[dict[str, Any]],
) -> dict[str, Any]:
    """`sampled` (of `sample`) and the policy that `policy` becomes by it; a KL term, where there is
    one, holds on to `reference`.

    What `earlier` iterations (as this function returned them) sampled is trained on again, beside
    this one's.
    """
    iteration, own, seconds = sampled["iteration"], dict(sampled), dict(sampled["seconds"])
    if reference:
        config, refs = (
            recipe.logprobs_config("ref"),
            {"rollouts": own["rollouts"], "policy": reference},
        )
        scored = _stage(recipe, "logprobs", iteration, forced, config, **refs)
        own["ref_logprobs"], seconds["logprobs ref"] = scored.ref, scored.seconds
    replayed = [_replayed(recipe, done, reference) for done in earlier]
    roles = [
        role for role in ("rollouts", "rewards", "ref_logprobs", "prox_logprobs") if role in own
    ]
    refs = {
        role: [own[role], *(each[role] for each in replayed)] if replayed else own[role]
        for role in roles
    }
    config = recipe.optimize_config()
    next_configs = _next_configs(recipe, iteration)
    updated = _stage(
        recipe,
        "optimize",
        iteration,
        forced,
        config,
        next_configs=next_configs,
        policy=policy,
        **refs,
    )
    seconds["optimize"] = updated.seconds
    return {**own, "policy": updated.ref, "evaluation": None, "seconds": seconds}


def _next_configs(recipe: Recipe, iteration: int) -> dict[str, Config]:
    """The config of the stage that comes after iteration `iteration` has optimized."""
    is_last = iteration == recipe.iterations
    if recipe.overlap and not is_last:
        return {}  # sampling goes on beside it
    if recipe.is_measured(iteration):
        return {"generate": recipe.generate_config(0, evaluation=True)}
    return {} if is_last else {"generate": recipe.generate_config(iteration + 1)}


def _stage(
    recipe: Recipe,
    name: str,
    iteration: int,
    forced: set[str],
    config: Any,
    *,
    next_configs: Mapping[str, Config] = MappingProxyType({}),
    **refs: str | list[str],
) -> Outcome:
    label, force = f"{name} {iteration}/{recipe.iterations}", name in forced
    return perform(
        recipe, label, name, config, refs, recipe.run, force, iteration, next_configs=next_configs
    )


def _replayed(recipe: Recipe, done: dict[str, Any], reference: str | None) -> dict[str, Any]:
    """What iteration `done` sampled, as optimize takes it; scored under the present reference where
    that has moved since."""
    if reference is None:
        return done
    config, refs = (
        recipe.logprobs_config("ref"),
        {"rollouts": done["rollouts"], "policy": reference},
    )
    label = f"logprobs of {done['iteration']}/{recipe.iterations}"
    again = perform(recipe, label, "logprobs", config, refs, recipe.run, False, done["iteration"])
    return {**done, "ref_logprobs": again.ref}


def choose_reference(
    recipe: Recipe, policies: list[str], iteration: int, before: str | None
) -> str | None:
    """What the KL term of this iteration holds on to: one of `policies` (the starting policy of
    every iteration so far), or their moving average, made of that of the iteration `before`. None
    where there is no such term."""
    rule = recipe.reference
    if recipe.optimize.kl_coef == 0:
        return None
    if rule.rule != "ema" or before is None:
        return policies[rule.start(iteration) - 1]
    refs, label = (
        {"reference": before, "policy": policies[-1]},
        f"reference {iteration}/{recipe.iterations}",
    )
    return perform(
        recipe,
        label,
        "average",
        AverageConfig(rate=rule.rate),
        refs,
        f"{recipe.run}.ref",
        False,
        iteration,
    ).ref


def _with_evaluation(
    done: dict[str, Any], evaluation: Outcome | None, baseline: Outcome | None
) -> dict[str, Any]:
    if evaluation is None:
        return {}
    seconds = {**done["seconds"], "evaluate": evaluation.seconds}
    return {
        "evaluation": {**numbers(evaluation), "baseline": numbers(baseline)},
        "seconds": seconds,
    }
