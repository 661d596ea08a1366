"""One stage on saved versions: re-score, re-train, fork, without the rest of the chain.

rerun(recipe, "reward", ("rollouts",), {"rollouts": "arith/rollouts@3"})
rerun(recipe, "optimize", ("policy", "rollouts", "rewards"), {"rollouts": ["arith/rollouts@3", "arith/rollouts@2"]})     # replay
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from schemas.errors import ConfigError, LineageError
from schemas.refs import parse
from stages.common.process import Call, Outcome, perform, run_stage
from stages.common.store import Store
from stages.common.work import NotDone

from .recipe import Recipe

_ORDER = ("rollouts", "rewards", "prompts", "policy")
_NEVER_FOUND = {"retry"}  # what is taken over is named, or nothing is
log = logging.getLogger("quiver")


def rerun(
    recipe: Recipe,
    stage: str,
    roles: tuple[str, ...],
    given: dict[str, str | list[str] | None],
    iteration: int = 1,
    force: bool = False,
) -> Outcome:
    """Run `stage` with the given references; one that is not given is found (see `find`). LineageError where there is none.

    Only optimize takes several rollouts and rewards, as lists.
    """
    foreign = sorted(role for role, ref in given.items() if ref and role not in roles)
    if foreign:
        takes = " and ".join(f"--{role}" for role in roles)
        raise ConfigError(f"--{foreign[0]}", f"quiver {stage} takes {takes}", next=f"leave --{foreign[0]} out")
    store = Store(recipe.store)
    refs = {role: _resolved(recipe, store, stage, role, given[role]) for role in roles if given.get(role)}
    for role in sorted(set(roles) - set(refs) - _NEVER_FOUND, key=_ORDER.index):
        refs[role] = find(recipe, store, role, refs, stage)
    if stage == "evaluate":
        return _evaluate(recipe, refs["policy"], iteration, force)
    if stage == "optimize":
        refs |= _scored_again(recipe, store, refs)
    outcome = _run(recipe, stage, _config(recipe, stage, iteration), refs, force)
    if outcome.ref == refs.get("retry"):
        log.info("%s has a reward in every row: there is nothing to retry", outcome.ref)
    return outcome


def _resolved(recipe: Recipe, store: Store, stage: str, role: str, given: str | list[str]) -> str | list[str]:
    kind = "rewards" if role == "retry" else role
    refs = [parse(ref, recipe.run) for ref in _listed(given)]
    foreign = [str(ref) for ref in refs if ref.kind != kind]
    if foreign:
        listing = f"quiver ls {recipe.run} --store {recipe.store}"
        raise ConfigError(f"--{role} {foreign[0]}", f"expected a version of {kind}", next=listing)
    found = [str(store.resolve(ref)) for ref in refs]
    if len(found) > 1 and stage != "optimize":
        raise ConfigError(f"--{role}", f"quiver {stage} takes one, got {len(found)}", next="name them one after another")
    return _plain(found)


def _listed(refs: str | list[str]) -> list[str]:
    return refs if isinstance(refs, list) else [refs]


def _plain(refs: list[str]) -> str | list[str]:
    """One reference as itself, several as they are."""
    return refs[0] if len(refs) == 1 else refs


def _run(recipe: Recipe, stage: str, config: Any, refs: dict[str, str | list[str]], force: bool = False) -> Outcome:
    call = Call(stage, config.model_dump(mode="json"), recipe.store, refs, recipe.run, force)
    place = recipe.placement
    return run_stage(call, python=place.python.get(stage), timeout=place.timeout_seconds.get(stage), online=recipe.online)


def _scored_again(recipe: Recipe, store: Store, refs: dict[str, str | list[str]]) -> dict[str, str | list[str]]:
    """The logprobs that the recipe's [optimize] asks for beside rollouts and rewards; made now where they are not there yet."""

    def score(role: str, policy_of: Callable[[str], str]) -> str | list[str]:
        config, each = recipe.logprobs_config(role), _listed(refs["rollouts"])
        return _plain([_run(recipe, "logprobs", config, {"rollouts": ref, "policy": policy_of(ref)}).ref for ref in each])

    found = {}
    if recipe.optimize.kl_coef > 0:
        if recipe.reference.rule != "fixed":
            what = "which policy is the reference of saved rollouts can not be told"
            raise ConfigError("reference.rule", what, next="--set reference.rule=fixed, which is policy@0")
        found["ref_logprobs"] = score("ref", lambda _: f"{recipe.run}/policy@0")
    if recipe.logprobs.prox:
        found["prox_logprobs"] = score("prox", lambda ref: store.open(ref).manifest.model("policy").ref)
    return found


def find(recipe: Recipe, store: Store, role: str, known: dict[str, str | list[str]], stage: str) -> str | list[str]:
    """The reference that is meant where none was given: what belongs to the known ones, or else the run's latest.

    Rewards are those that this recipe's [reward] gave the rollouts, rollouts are those of the known rewards, the policy to
    optimize is the newest of those that sampled the rollouts, and the one to score under is policy@0. A policy that is not there
    yet is imported.
    """
    run = recipe.run
    if role == "rewards":
        return _plain([_rewards(recipe, ref) for ref in _listed(known["rollouts"])])
    scored = known.get("rewards") or known.get("retry")
    if role == "rollouts" and scored:
        return _plain([store.open(ref).manifest.input("rollouts").ref for ref in _listed(scored)])
    if role == "policy" and stage == "logprobs":
        return f"{run}/policy@0"
    if role == "policy" and stage == "optimize":
        sampled = [store.open(ref).manifest.model("policy").ref for ref in _listed(known["rollouts"])]
        return max(sampled, key=lambda ref: parse(ref).version)  # the number goes on along the line, into other runs too
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
            next=f"quiver reward RECIPE --rollouts {rollouts}, with the same recipe and --set; or name --rewards REF",
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
