"""One stage on saved versions: re-score, re-train, fork, without the rest of the chain.

rerun(recipe, "reward", ("rollouts",), {"rollouts": "arith/rollouts@3"})
"""

from __future__ import annotations

import logging
from typing import Any

from schemas.errors import ConfigError, LineageError
from stages.common.process import Call, Outcome, perform, run_stage
from stages.common.store import Store
from stages.common.work import NotDone

from .recipe import Recipe

_ORDER = ("rollouts", "rewards", "prompts", "policy")
_NEVER_FOUND = {"retry"}  # what is taken over is named, or nothing is
log = logging.getLogger("quiver")


def rerun(
    recipe: Recipe, stage: str, roles: tuple[str, ...], given: dict[str, str | None], iteration: int = 1, force: bool = False
) -> Outcome:
    """Run `stage` with the given references; one that is not given is found (see `find`). LineageError where there is none."""
    foreign = sorted(role for role, ref in given.items() if ref and role not in roles)
    if foreign:
        takes = " and ".join(f"--{role}" for role in roles)
        raise ConfigError(f"--{foreign[0]}", f"quiver {stage} takes {takes}", next=f"leave --{foreign[0]} out")
    store = Store(recipe.store)
    refs = {role: str(store.resolve(given[role], recipe.run)) for role in roles if given.get(role)}
    for role in sorted(set(roles) - set(refs) - _NEVER_FOUND, key=_ORDER.index):
        refs[role] = find(recipe, store, role, refs, stage)
    if stage == "evaluate":
        return _evaluate(recipe, refs["policy"], iteration, force)
    if stage == "optimize":
        refs |= _scored_again(recipe, refs)
    outcome = _run(recipe, stage, _config(recipe, stage, iteration), refs, force)
    if outcome.ref == refs.get("retry"):
        log.info("%s has a reward in every row: there is nothing to retry", outcome.ref)
    return outcome


def _run(recipe: Recipe, stage: str, config: Any, refs: dict[str, str], force: bool = False) -> Outcome:
    call = Call(stage, config.model_dump(mode="json"), recipe.store, refs, recipe.run, force)
    place = recipe.placement
    return run_stage(call, python=place.python.get(stage), timeout=place.timeout_seconds.get(stage), online=recipe.online)


def _scored_again(recipe: Recipe, refs: dict[str, str]) -> dict[str, str]:
    """The logprobs that the recipe's [optimize] asks for beside rollouts and rewards; made now where they are not there yet."""
    found = {}
    if recipe.optimize.kl_coef > 0:
        if recipe.reference.rule != "fixed":
            what = "which policy is the reference of saved rollouts can not be told"
            raise ConfigError("reference.rule", what, next="--set reference.rule=fixed, which is policy@0")
        refs_of = {"rollouts": refs["rollouts"], "policy": f"{recipe.run}/policy@0"}
        found["ref_logprobs"] = _run(recipe, "logprobs", recipe.logprobs_config("ref"), refs_of).ref
    if recipe.logprobs.prox:
        refs_of = {"rollouts": refs["rollouts"], "policy": refs["policy"]}
        found["prox_logprobs"] = _run(recipe, "logprobs", recipe.logprobs_config("prox"), refs_of).ref
    return found


def find(recipe: Recipe, store: Store, role: str, known: dict[str, str], stage: str) -> str:
    """The reference that is meant where none was given: what belongs to the known ones, or else the run's latest.

    Rewards are those that this recipe's [reward] gave the rollouts, rollouts are those of the known rewards, the policy to
    optimize is the one that sampled the rollouts, and the one to score under is policy@0. A policy that is not there yet is
    imported.
    """
    run = recipe.run
    if role == "rewards":
        return _rewards(recipe, known["rollouts"])
    if role == "rollouts" and ("rewards" in known or "retry" in known):
        return store.open(known.get("rewards") or known["retry"]).manifest.input("rollouts").ref
    if role == "policy" and stage == "logprobs":
        return f"{run}/policy@0"
    if role == "policy" and stage == "optimize":
        return store.open(known["rollouts"]).manifest.model("policy").ref
    if role == "policy" and not store.numbers(run, "policy"):
        return _run(recipe, "policy", recipe.policy, {}).ref
    return str(store.resolve(f"{run}/{role}@latest"))


def _rewards(recipe: Recipe, rollouts: str) -> str:
    call = Call("reward", recipe.reward.model_dump(mode="json"), recipe.store, {"rollouts": rollouts}, recipe.run)
    try:
        return perform(call, lookup=True).ref
    except NotDone:
        raise LineageError(
            rollouts,
            "this recipe's [reward] has not scored these rollouts",
            next="quiver reward RECIPE --rollouts REF with the same --set; or name --rewards REF",
        ) from None


def _evaluate(recipe: Recipe, policy: str, iteration: int, force: bool) -> Outcome:
    from .evaluation import measure

    done = measure(recipe, policy, iteration, {"evaluate"} if force else frozenset())
    if done is None:
        raise ConfigError("data.held_out", "the recipe names no held-out rows", next="add [data.held_out] to the recipe")
    return done


def _config(recipe: Recipe, stage: str, iteration: int) -> Any:
    makers = {
        "prompt": lambda: recipe.prompt_config(iteration),
        "generate": lambda: recipe.generate_config(iteration),
        "reward": lambda: recipe.reward,
        "logprobs": lambda: recipe.logprobs_config("ref"),
        "optimize": recipe.optimize_config,
    }
    return makers[stage]()
