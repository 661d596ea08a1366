"""One stage on saved versions: re-score, re-train, fork, without the rest of the chain.

Plain Python, so that the shell needs no Prefect for it; `single` has the same as flows. A Prefect
server that the environment names is told of each version (`by_hand`).

    rerun(recipe, "reward", {"rollouts": "arith/rollouts@3"})
    rerun(recipe, "optimize", {"rollouts": ["arith/rollouts@3", "arith/rollouts@2"]})     # replay
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import parse
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.runner import Outcome, find
from quiver.stages.common.store import Store
from quiver.stages.reward.override import load as load_override

from .by_hand import tell_version
from .dispatch import run_at
from .placement import check_placement, stage_call
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
_SEARCH_ORDER = ("rollouts", "rewards", "prompts", "policy")
"""Roles that are found where they are not named, each by those before it."""
_MAKERS = {"prompts": "quiver prompt RECIPE", "rollouts": "quiver generate RECIPE"}
References = Mapping[str, str | list[str] | None]
"""What the caller names, by role."""
RefLists = dict[str, list[str]]
"""Resolved references by role; only optimize takes several of a role."""
log = logging.getLogger("quiver")


def perform_by_hand(
    recipe: Recipe,
    stage: str,
    config: Config,
    refs: Mapping[str, str | list[str]],
    *,
    label: str = "",
    into: str | None = None,
    force: bool = False,
    iteration: int | None = None,
) -> Outcome:
    """As `tasks.perform`, without Prefect; a server that the environment names is told of the
    version. A line is logged where there is a `label`."""
    call = stage_call(recipe, stage, config, refs, into=into, force=force)
    outcome = run_at(call, recipe.placement)
    tell_version(call.runner_call, outcome)
    if label:
        from .tasks import describe

        log.info("%s", describe(label, outcome))
    return outcome


def rerun(
    recipe: Recipe,
    stage: str,
    references: References,
    iteration: int = 1,
    force: bool = False,
    perform: Callable[..., Outcome] = perform_by_hand,
) -> Outcome:
    """Run `stage` with the given references; one that is not given is found (see `find_refs`).
    LineageError where there is none.

    Only optimize takes several rollouts and rewards, as lists. `perform` runs a stage, as
    `tasks.perform` does.
    """
    roles = ROLES[stage]
    run = partial(perform, recipe, iteration=iteration)
    check_placement(recipe)
    store = Store(recipe.store)
    refs = _resolve(recipe, store, stage, roles, references, f"quiver {stage}")
    for role in _SEARCH_ORDER:
        if role in roles and role not in refs:
            refs[role] = find_refs(recipe, store, stage, role, refs, run)
    if stage == "evaluate":
        from .evaluation import measure, require_held_out

        require_held_out(recipe)
        forced = {"evaluate"} if force else ()
        return measure(recipe, refs["policy"][0], iteration, forced, perform=perform)
    if stage == "optimize":
        refs |= _score_again(recipe, store, refs, run)
    if stage in ("prompt", "generate"):
        config = getattr(recipe, f"{stage}_config")(iteration)
    elif stage == "logprobs":
        config = recipe.logprobs_config("ref")
    else:
        config = recipe.optimize_config() if stage == "optimize" else recipe.reward
    plain = {role: listed[0] if len(listed) == 1 else listed for role, listed in refs.items()}
    outcome = run(stage, config, plain, force=force)
    if outcome.ref == plain.get("retry"):
        log.info("%s has a reward in every row: there is nothing to retry", outcome.ref)
    return outcome


def override(recipe: Recipe, path: str, references: References, force: bool = False) -> Outcome:
    """Replace single rewards as the JSON file `path` says (`quiver.stages.reward.override`): in the
    given rewards, or else in those that this recipe's [reward] gave the given or latest
    rollouts."""
    roles = ("rollouts", "rewards")
    run = partial(perform_by_hand, recipe)
    store = Store(recipe.store)
    refs = _resolve(recipe, store, "reward", roles, references, "quiver reward --override")
    config = load_override(path)
    if "rewards" not in refs:
        for role in roles:
            if role not in refs:
                refs[role] = find_refs(recipe, store, "reward", role, refs, run)
    return run("override", config, {"rewards": refs["rewards"][0]}, force=force)


def _resolve(
    recipe: Recipe,
    store: Store,
    stage: str,
    roles: Collection[str],
    references: References,
    command: str,
) -> RefLists:
    """The references that the caller names, as versions that are there. ConfigError for a role that
    the command does not take, for a version of another kind, and for several where it takes
    one."""
    named = {role: ref for role, ref in references.items() if ref}
    foreign = sorted(set(named) - set(roles))
    if foreign:
        raise ConfigError(
            f"--{foreign[0]}",
            f"{command} takes {' and '.join(f'--{role}' for role in roles)}",
            next=f"leave --{foreign[0]} out",
        )
    refs: RefLists = {}
    for role in roles:
        if role not in named:
            continue
        listed = named[role] if isinstance(named[role], list) else [named[role]]
        kind = "rewards" if role == "retry" else role
        parsed = [parse(ref, recipe.run) for ref in listed]
        for ref in parsed:
            if ref.kind != kind:
                raise ConfigError(
                    f"--{role} {ref}",
                    f"expected a version of {kind}",
                    next=f"quiver ls {recipe.run}",
                )
        refs[role] = [str(store.resolve(ref)) for ref in parsed]
        if len(parsed) > 1 and stage != "optimize":
            raise ConfigError(
                f"--{role}",
                f"quiver {stage} takes one, got {len(parsed)}",
                next="name them one after another",
            )
    return refs


def find_refs(
    recipe: Recipe,
    store: Store,
    stage: str,
    role: str,
    refs: RefLists,
    run: Callable[..., Outcome],
) -> list[str]:
    """The references that are meant where none was given: what belongs to `refs`, or else the run's
    latest.

    Rewards are those that this recipe's [reward] gave the rollouts, rollouts are those of the
    rewards, the policy to optimize is the newest of those that sampled the rollouts, and the one to
    score under is the first of its line. A policy that is not there yet is imported.
    """
    if role == "rewards":
        return [_rewards_of(recipe, ref) for ref in refs["rollouts"]]
    scored = refs.get("rewards") or refs.get("retry")
    if role == "rollouts" and scored:
        return [store.open(ref).manifest.input("rollouts").ref for ref in scored]
    if role == "policy" and stage in ("logprobs", "optimize"):
        samplers = [sampling_policy(store, ref) for ref in refs["rollouts"]]
        # the number goes on along the line, into other runs too
        newest = max(samplers, key=lambda ref: parse(ref).version)
        return [newest if stage == "optimize" else first_of_line(store, newest)]
    if store.numbers(recipe.run, role):
        return [str(store.resolve(f"{recipe.run}/{role}@latest"))]
    if role == "policy":
        return [run("policy", recipe.policy, {}).ref]
    raise LineageError(
        f"{recipe.run}/{role}@latest", f"run {recipe.run} has no {role} yet", next=_MAKERS[role]
    )


def _rewards_of(recipe: Recipe, rollouts: str) -> str:
    call = stage_call(recipe, "reward", recipe.reward, {"rollouts": rollouts})
    outcome = find(call.runner_call)
    if outcome is None:
        raise LineageError(
            rollouts,
            "this recipe's [reward] has not scored these rollouts",
            next=f"quiver reward RECIPE --rollouts {rollouts}",
        )
    return outcome.ref


def _score_again(
    recipe: Recipe, store: Store, refs: RefLists, run: Callable[..., Outcome]
) -> RefLists:
    """The logprobs that the recipe's [optimize] asks for beside rollouts and rewards; made now
    where they are not there yet."""
    scorers: dict[str, Callable[[str], str]] = {}
    if recipe.optimize.kl_coef > 0:
        if recipe.reference.rule != "fixed":
            raise ConfigError(
                "reference.rule",
                "which policy is the reference of saved rollouts can not be told",
                next='set reference.rule = "fixed", which is the first policy of the line',
            )
        reference = first_of_line(store, refs["policy"][0])
        scorers["ref"] = lambda rollouts: reference
    if recipe.logprobs.prox:
        scorers["prox"] = lambda rollouts: sampling_policy(store, rollouts)
    logprobs: RefLists = {}
    for role, policy_of in scorers.items():
        config = recipe.logprobs_config(role)
        logprobs[f"{role}_logprobs"] = [
            run("logprobs", config, {"rollouts": rollouts, "policy": policy_of(rollouts)}).ref
            for rollouts in refs["rollouts"]
        ]
    return logprobs


def sampling_policy(store: Store, rollouts: str) -> str:
    """The policy that sampled the rollouts."""
    return store.open(rollouts).manifest.model("policy").ref


def first_of_line(store: Store, policy: str) -> str:
    """The base model that `policy` came from by optimizing, in whatever run that lies: policy@0 of
    its run, and of a fork policy@0 of the run that it left."""
    version = store.open(policy)
    while parent := version.manifest.input("policy"):
        version = store.open(parent.ref)
    return str(version.ref)
