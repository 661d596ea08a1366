"""Run one stage on saved versions, without the rest of the chain: score again, train again, fork.

Look here for `quiver generate`, `reward`, `optimize` and the like. This is plain Python, so the
command line needs no Prefect for it.

    with by_hand(recipe):
        rerun(recipe, "reward", {"rollouts": "arith/rollouts@3"})
        rerun(recipe, "optimize", {"rollouts": ["arith/rollouts@3", "arith/rollouts@2"]})   # replay
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.manifest import line_of
from quiver.schemas.refs import parse
from quiver.stages.core.config import Config
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.runner import find_outcome
from quiver.stages.core.run.stage import load_stage
from quiver.stages.core.store import Store
from quiver.stages.model import checkpoints

from .calls import perform
from .evaluation import measure
from .placement import check_places
from .recipe import Recipe
from .rounds import proximal_config
from .sections import Optimize

ROLES = {
    "prompt": ("policy", "rewards"),
    "generate": ("prompts", "policy"),
    "reward": ("rollouts", "retry"),
    "logprobs": ("rollouts", "policy"),
    "optimize": ("policy", "rollouts", "rewards"),
    "evaluate": ("policy",),
    "override": ("rollouts", "rewards"),
}
"""Roles of the references that each stage accepts."""
_SEARCH_ORDER = ("rollouts", "rewards", "prompts", "policy")
"""Order in which missing roles are found; each may use the roles before it."""
_MAKERS = {"prompts": "quiver prompt RECIPE", "rollouts": "quiver generate RECIPE"}
References = Mapping[str, str | list[str] | None]
"""References named by the caller, by role."""
RefLists = dict[str, list[str]]
"""Resolved references by role; only optimize and prompt take several for one role."""
log = logging.getLogger("quiver")


def rerun(
    recipe: Recipe,
    stage: str,
    references: References,
    iteration: int = 1,
    force: bool = False,
    overrides: Config | None = None,
    into: str | None = None,
) -> Outcome:
    """Run `stage` with the given references; missing ones are found.

    Args:
        recipe: The recipe; its run, store and placement apply.
        stage: Name of the stage.
        references: Version references by role. Only optimize takes several rollouts and rewards, as
            lists. prompt takes several rewards, which its curriculum uses.
        iteration: Iteration that seeds and prompt rows are taken for.
        force: Run it again even if a finished version exists.
        overrides: Config of the stage `override`: which rewards it replaces.
        into: Run of the new policy, if the stage is optimize. Default: the recipe's.

    Raises:
        LineageError: If a missing reference cannot be found.
        ConfigError: If a reference does not fit the stage.
    """
    if stage != "override":  # override always runs here, in this process's host.
        check_places(recipe.placement, recipe.store)
    if stage in ("prompt", "evaluate"):
        recipe.data.require_filled_in()
    store = Store(recipe.store)
    refs = _named_versions(recipe.run, store, stage, references)
    optional = (*refs, "rewards") if stage == "prompt" else refs
    for role in [role for role in _SEARCH_ORDER if role in ROLES[stage] and role not in optional]:
        refs[role] = find_refs(recipe, store, stage, role, refs)
    log.info("%-22s %s", f"{stage} of", ", ".join(ref for role in refs.values() for ref in role))
    if stage == "evaluate":
        recipe.data.require_held_out()
        forced = {"evaluate"} if force else ()
        policy = refs["policy"][0]
        return measure(recipe.held_out_resolved(), policy, iteration, forced)
    if stage == "optimize":
        warn_of_temperatures(recipe.generate.sampling.temperature, store, refs["rollouts"])
        config = load_stage(stage).resolve(recipe.optimize_config())
        section = recipe.optimize.model_copy(update=dict(config))
        if section.kl_coef > 0 and recipe.reference.rule != "fixed":
            raise ConfigError(
                "reference.rule",
                "cannot tell which policy is the reference of saved rollouts",
                next='set reference.rule = "fixed", and name the policy in reference.policy',
            )
        refs |= make_logprobs(recipe, section, store, refs, iteration)
    elif stage == "override":
        del refs["rollouts"]
        config = overrides
    elif stage == "logprobs":
        config = recipe.logprobs.for_role("ref")
    elif stage == "reward":
        config = recipe.reward
    else:
        config = getattr(recipe, f"{stage}_config")(iteration)
    resolve = getattr(load_stage(stage), "resolve", None)
    # Once, here: otherwise each plan of an open config would read its source again.
    if resolve is not None:
        config = resolve(config)
    plain = {role: listed[0] if len(listed) == 1 else listed for role, listed in refs.items()}
    outcome = perform(stage, config, plain, force=force, iteration=iteration, into=into)
    if outcome.ref == plain.get("retry"):
        log.info("%s has a reward in every row: there is nothing to retry", outcome.ref)
    return outcome


def _named_versions(run: str, store: Store, stage: str, references: References) -> RefLists:
    """Return the named references as existing versions.

    Raises ConfigError if the stage does not take a role, if a version has another kind, or if
    several versions are named for a role that takes one.
    """
    command = "quiver reward --override" if stage == "override" else f"quiver {stage}"
    refs: RefLists = {}
    for role, named in sorted(references.items()):
        if not named:
            continue
        if role not in ROLES[stage]:
            raise ConfigError(
                f"--{role}",
                f"{command} takes {' and '.join(f'--{role}' for role in ROLES[stage])}",
                next=f"leave --{role} out",
            )
        parsed = [parse(ref, run) for ref in ([named] if isinstance(named, str) else named)]
        kind = "rewards" if role == "retry" else role
        for ref in parsed:
            if ref.kind != kind:
                raise ConfigError(
                    f"--{role} {ref}",
                    f"expected a version of {kind}",
                    next=f"quiver ls {run}",
                )
        refs[role] = [str(store.resolve(ref)) for ref in parsed]
        if len(parsed) > 1 and stage not in ("optimize", "prompt"):
            raise ConfigError(
                f"--{role}",
                f"{command} takes one version, got {len(parsed)}",
                next="run the command once for each",
            )
    return refs


def find_refs(recipe: Recipe, store: Store, stage: str, role: str, refs: RefLists) -> list[str]:
    """Find the references of a role that was not given: the versions that belong to `refs`, else
    the run's latest.

    - rewards: the run's own of the rollouts, by the recipe's [reward].
    - rollouts: the ones that the rewards scored.
    - policy to optimize: the newest policy that sampled the rollouts.
    - policy of the logprobs: the one that [reference] names, else the first policy of its line. A
      base policy that does not exist yet is imported.

    Raises LineageError if a role cannot be found.
    """
    run = recipe.run
    if role == "rewards":
        rewards = []
        config = recipe.reward.model_dump(mode="json")
        for ref in refs["rollouts"]:
            outcome = find_outcome(Call("reward", config, store.url, {"rollouts": ref}, into=run))
            if outcome is None:
                raise LineageError(
                    ref,
                    "this recipe's [reward] has not scored these rollouts",
                    next=f"quiver reward RECIPE --rollouts {ref}",
                )
            rewards.append(outcome.ref)
        return rewards
    scored = refs.get("rewards") or refs.get("retry")
    if role == "rollouts" and scored:
        return [store.open(ref).manifest.require_input("rollouts").ref for ref in scored]
    if role == "policy" and stage in ("logprobs", "optimize"):
        samplers = [
            store.open(ref).manifest.require_model("policy").ref for ref in refs["rollouts"]
        ]
        # Version numbers keep rising along the line, also into other runs.
        newest = max(samplers, key=lambda ref: parse(ref).version)
        if stage == "optimize":
            return [newest]
        return [recipe.kl_reference() or first_of_line(store, newest)]
    latest = f"{run}/{role}@latest"
    if store.numbers(run, role):
        return [str(store.resolve(latest))]
    if role == "policy":
        return [perform("policy", checkpoints.resolve(recipe.policy), {}).ref]
    raise LineageError(latest, f"run {run} has no {role} yet", next=_MAKERS[role])


def make_logprobs(
    recipe: Recipe, optimize: Optimize, store: Store, refs: RefLists, iteration: int
) -> RefLists:
    """Return the logprobs that `optimize` needs beside rollouts and rewards; missing ones are made
    now.

    The KL term's reference policy is the one that [reference] names, else the first of the line.
    """
    logprobs = recipe.logprobs
    policies: RefLists = {}
    if optimize.kl_coef > 0:
        reference = recipe.kl_reference() or first_of_line(store, refs["policy"][0])
        policies["ref"] = [reference] * len(refs["rollouts"])
    manifests = [store.open(rollouts).manifest for rollouts in refs["rollouts"]]
    samplings = [manifest.config_section("sampling") for manifest in manifests]
    prox_config = proximal_config(optimize, logprobs, samplings)
    if prox_config is not None:
        policies["prox"] = [
            refs["policy"][0]
            if prox_config.prox_of == "start"
            else manifest.require_model("policy").ref
            for manifest in manifests
        ]
    configs = {"ref": logprobs.for_role("ref"), "prox": prox_config}
    return {
        f"{role}_logprobs": [
            perform(
                "logprobs",
                configs[role],
                {"rollouts": rollouts, "policy": policy},
                iteration=iteration,
            ).ref
            for rollouts, policy in zip(refs["rollouts"], of_rollouts, strict=True)
        ]
        for role, of_rollouts in policies.items()
    }


def warn_of_temperatures(temperature: float, store: Store, rollouts: list[str]) -> None:
    """Warn if rollouts were sampled at another temperature than the recipe's.

    The optimizer step uses the temperature stored with each row.
    """
    named = pa.scalar(temperature, pa.float32())
    for ref in rollouts:
        sampled_at = pc.unique(store.open(ref).table(["temperature"])["temperature"]).to_pylist()
        differing = [f"{sampled:g}" for sampled in sorted(sampled_at) if sampled != named.as_py()]
        if differing:
            log.warning(
                "%s was sampled at temperature %s, and generate.sampling.temperature is %g: the "
                "step uses the temperature that is stored with each rollout",
                ref,
                ", ".join(differing[:5]),
                temperature,
            )


def first_of_line(store: Store, policy: str) -> str:
    """Return the base model from which `policy` was trained, in any run.

    This is policy@0 of its run; for a fork, policy@0 of the run it was forked from.
    """
    with_expired = store.with_expired()  # a manifest is enough
    newest = with_expired.open(policy).manifest
    *_, first = line_of(newest, lambda ref: with_expired.open(ref).manifest)
    return first.ref
