"""One stage on saved versions: re-score, re-train, fork, without the rest of the chain.

Plain Python, so that the shell needs no Prefect for it; `quiver.flows.single` has the same as
flows. A Prefect server that the environment names is told of each version (`by_hand`).

rerun(recipe, "reward", ("rollouts",), {"rollouts": "arith/rollouts@3"})
rerun(recipe, "optimize", ("policy", "rollouts", "rewards"), {"rollouts": ["arith/rollouts@3", "arith/rollouts@2"]})     # replay
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import parse
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.runtime.runner import find as find_finished
from quiver.stages.common.store import Store
from quiver.stages.reward.override import load as load_override

from .by_hand import tell_version
from .placement import check_placement, place
from .recipe import Recipe

ROLES = {
    "prompt": ("policy",),
    "generate": ("prompts", "policy"),
    "reward": ("rollouts", "retry"),
    "logprobs": ("rollouts", "policy"),
    "optimize": ("policy", "rollouts", "rewards"),
    "evaluate": ("policy",),
}
"""The references that each stage can be given."""
_ORDER = ("rollouts", "rewards", "prompts", "policy")
_MAKERS = {"prompts": "quiver prompt RECIPE", "rollouts": "quiver generate RECIPE"}
_NEVER_FOUND = {"retry"}  # what is taken over is named, or nothing is
Refs = dict[str, str | list[str]]
Run = Callable[[Recipe, str, Any, Refs, bool], Outcome]
"""How a stage is called: recipe, stage, config, references, force."""
log = logging.getLogger("quiver")


def rerun(
    recipe: Recipe,
    stage: str,
    roles: tuple[str, ...],
    given: dict[str, str | list[str] | None],
    iteration: int = 1,
    force: bool = False,
    run: Run | None = None,
) -> Outcome:
    """Run `stage` with the given references; one that is not given is found (see `find`).
    LineageError where there is none.

    Only optimize takes several rollouts and rewards, as lists. `run` calls the stage; by default
    where [placement] says.
    """
    by_hand, run = run is None, run or _run
    check_placement(recipe)
    _require_roles(f"quiver {stage}", roles, given)
    store = Store(recipe.store)
    refs = {
        role: _resolved(recipe, store, stage, role, given[role])
        for role in roles
        if given.get(role)
    }
    for role in sorted(set(roles) - set(refs) - _NEVER_FOUND, key=_ORDER.index):
        refs[role] = find(recipe, store, role, refs, stage, run)
    if stage == "evaluate":
        return _evaluate(recipe, refs["policy"], iteration, force, by_hand)
    if stage == "optimize":
        refs |= _scored_again(recipe, store, refs, run)
    outcome = run(recipe, stage, _config(recipe, stage, iteration), refs, force)
    if outcome.ref == refs.get("retry"):
        log.info("%s has a reward in every row: there is nothing to retry", outcome.ref)
    return outcome


def override(
    recipe: Recipe, path: str, given: dict[str, str | list[str] | None], force: bool = False
) -> Outcome:
    """Replace single rewards as the JSON file `path` says (`quiver.stages.reward.override`): in the
    given rewards, or else in those that this recipe's [reward] gave the given or latest
    rollouts."""
    _require_roles("quiver reward --override", ("rollouts", "rewards"), given)
    store, config = Store(recipe.store), load_override(path)
    refs = {
        role: _resolved(recipe, store, "reward", role, ref) for role, ref in given.items() if ref
    }
    for role in ("rollouts", "rewards") if "rewards" not in refs else ():
        refs.setdefault(role, find(recipe, store, role, refs, "reward", _run))
    return _run(recipe, "override", config, {"rewards": refs["rewards"]}, force)


def _require_roles(
    command: str, roles: tuple[str, ...], given: dict[str, str | list[str] | None]
) -> None:
    foreign = sorted(role for role, ref in given.items() if ref and role not in roles)
    if foreign:
        takes = " and ".join(f"--{role}" for role in roles)
        raise ConfigError(
            f"--{foreign[0]}", f"{command} takes {takes}", next=f"leave --{foreign[0]} out"
        )


def _resolved(
    recipe: Recipe, store: Store, stage: str, role: str, given: str | list[str]
) -> str | list[str]:
    kind = "rewards" if role == "retry" else role
    refs = [parse(ref, recipe.run) for ref in _listed(given)]
    foreign = [str(ref) for ref in refs if ref.kind != kind]
    if foreign:
        raise ConfigError(
            f"--{role} {foreign[0]}",
            f"expected a version of {kind}",
            next=f"quiver ls {recipe.run}",
        )
    found = [str(store.resolve(ref)) for ref in refs]
    if len(found) > 1 and stage != "optimize":
        raise ConfigError(
            f"--{role}",
            f"quiver {stage} takes one, got {len(found)}",
            next="name them one after another",
        )
    return _plain(found)


def _listed(refs: str | list[str]) -> list[str]:
    return refs if isinstance(refs, list) else [refs]


def _plain(refs: list[str]) -> str | list[str]:
    """One reference as itself, several as they are."""
    return refs[0] if len(refs) == 1 else refs


def _run(
    recipe: Recipe, stage: str, config: Any, refs: Refs, force: bool, into: str | None = None
) -> Outcome:
    call = Call(
        stage, config.model_dump(mode="json"), recipe.store, refs, into or recipe.run, force
    )
    outcome = place(recipe, call, f"{recipe.run} · {stage}")
    tell_version(call, outcome)
    return outcome


def _scored_again(recipe: Recipe, store: Store, refs: Refs, run: Run) -> Refs:
    """The logprobs that the recipe's [optimize] asks for beside rollouts and rewards; made now
    where they are not there yet."""

    def score(role: str, policy_of: Callable[[str], str]) -> str | list[str]:
        config, each = recipe.logprobs_config(role), _listed(refs["rollouts"])
        return _plain(
            [
                run(
                    recipe, "logprobs", config, {"rollouts": ref, "policy": policy_of(ref)}, False
                ).ref
                for ref in each
            ]
        )

    found = {}
    if recipe.optimize.kl_coef > 0:
        if recipe.reference.rule != "fixed":
            what = "which policy is the reference of saved rollouts can not be told"
            raise ConfigError(
                "reference.rule",
                what,
                next='set reference.rule = "fixed", which is the first policy of the line',
            )
        reference = first_of_line(store, refs["policy"])
        found["ref_logprobs"] = score("ref", lambda _: reference)
    if recipe.logprobs.prox:
        found["prox_logprobs"] = score(
            "prox", lambda ref: store.open(ref).manifest.model("policy").ref
        )
    return found


def first_of_line(store: Store, policy: str) -> str:
    """The base model that `policy` came from by optimizing, in whatever run that lies: policy@0 of
    its run, and of a fork policy@0 of the run that it left."""
    version = store.open(policy)
    while before := version.manifest.input("policy"):
        version = store.open(before.ref)
    return str(version.ref)


def find(
    recipe: Recipe, store: Store, role: str, known: Refs, stage: str, run: Run | None = None
) -> str | list[str]:
    """The reference that is meant where none was given: what belongs to the known ones, or else the
    run's latest.

    Rewards are those that this recipe's [reward] gave the rollouts, rollouts are those of the known
    rewards, the policy to optimize is the newest of those that sampled the rollouts, and the one to
    score under is the first of its line. A policy that is not there yet is imported.
    """
    if role == "rewards":
        return _plain([_rewards(recipe, ref) for ref in _listed(known["rollouts"])])
    scored = known.get("rewards") or known.get("retry")
    if role == "rollouts" and scored:
        return _plain([store.open(ref).manifest.input("rollouts").ref for ref in _listed(scored)])
    if role == "policy" and stage in ("logprobs", "optimize"):
        sampled = [
            store.open(ref).manifest.model("policy").ref for ref in _listed(known["rollouts"])
        ]
        newest = max(
            sampled, key=lambda ref: parse(ref).version
        )  # the number goes on along the line, into other runs too
        return newest if stage == "optimize" else first_of_line(store, newest)
    if role == "policy" and not store.numbers(recipe.run, "policy"):
        return (run or _run)(recipe, "policy", recipe.policy, {}, False).ref
    if not store.numbers(recipe.run, role):
        raise LineageError(
            f"{recipe.run}/{role}@latest", f"run {recipe.run} has no {role} yet", next=_MAKERS[role]
        )
    return str(store.resolve(f"{recipe.run}/{role}@latest"))


def _rewards(recipe: Recipe, rollouts: str) -> str:
    call = Call(
        "reward",
        recipe.reward.model_dump(mode="json"),
        recipe.store,
        {"rollouts": rollouts},
        recipe.run,
    )
    outcome = find_finished(call)
    if outcome is None:
        raise LineageError(
            rollouts,
            "this recipe's [reward] has not scored these rollouts",
            next=f"quiver reward RECIPE --rollouts {rollouts}",
        )
    return outcome.ref


def _evaluate(recipe: Recipe, policy: str, iteration: int, force: bool, by_hand: bool) -> Outcome:
    from .evaluation import measure, require_held_out

    require_held_out(recipe)
    forced = {"evaluate"} if force else frozenset()
    return measure(recipe, policy, iteration, forced, run=_run if by_hand else None)


def _config(recipe: Recipe, stage: str, iteration: int) -> Any:
    makers = {
        "prompt": lambda: recipe.prompt_config(iteration),
        "generate": lambda: recipe.generate_config(iteration),
        "reward": lambda: recipe.reward,
        "logprobs": lambda: recipe.logprobs_config("ref"),
        "optimize": recipe.optimize_config,
    }
    return makers[stage]()
