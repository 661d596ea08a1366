"""One stage on saved versions: re-score, re-train, fork, without the rest of the chain.

rerun(recipe, "reward", ("rollouts",), {"rollouts": "arith/rollouts@3"}, iteration=1)
"""

from __future__ import annotations

from typing import Any

from schemas.errors import LineageError
from stages.common.process import Call, Outcome, run_stage
from stages.common.store import Store

from .recipe import Recipe


def rerun(
    recipe: Recipe, stage: str, roles: tuple[str, ...], given: dict[str, str | None], iteration: int = 1, force: bool = False
) -> Outcome:
    """Run `stage` with the given references; one that is not given is found (see `find`). LineageError where there is none."""
    store = Store(recipe.store)
    refs = {role: str(store.resolve(given[role], recipe.run)) for role in roles if given.get(role)}
    for role in sorted(set(roles) - set(refs), key=("rewards", "rollouts", "prompts", "policy").index):
        refs[role] = find(recipe, store, role, refs, stage)
    if stage == "evaluate":
        from .evaluation import measure

        return measure(recipe, refs["policy"], iteration, {"evaluate"} if force else set())
    call = Call(stage, _config(recipe, stage, iteration).model_dump(mode="json"), recipe.store, refs, recipe.run, force)
    place = recipe.placement
    return run_stage(call, python=place.python.get(stage), timeout=place.timeout_seconds.get(stage), online=recipe.online)


def find(recipe: Recipe, store: Store, role: str, known: dict[str, str], stage: str) -> str:
    """The reference that is meant where none was given: what belongs to the known ones, or else the run's latest.

    Rewards are the newest of the known rollouts, rollouts are those of the known rewards, and the policy to optimize is the one
    that sampled the rollouts. A policy that is not there yet is imported.
    """
    run = recipe.run
    if role == "rewards" and "rollouts" in known:
        scored = [v for v in store.versions(run, "rewards") if v.manifest.input("rollouts").ref == known["rollouts"]]
        if not scored:
            raise LineageError(
                known["rollouts"], "these rollouts have no rewards yet", next="quiver reward RECIPE --rollouts REF"
            )
        return str(scored[-1].ref)
    if role == "rollouts" and "rewards" in known:
        return store.open(known["rewards"]).manifest.input("rollouts").ref
    if role == "policy" and stage == "optimize":
        return store.open(known["rollouts"]).manifest.model("policy").ref
    if role == "policy" and not store.numbers(run, "policy"):
        call = Call("policy", recipe.policy.model_dump(mode="json"), recipe.store, {}, run)
        return run_stage(call, online=recipe.online).ref
    return str(store.resolve(f"{run}/{role}@latest"))


def _config(recipe: Recipe, stage: str, iteration: int) -> Any:
    makers = {
        "prompt": lambda: recipe.prompt_config(iteration),
        "generate": lambda: recipe.generate_config(iteration),
        "reward": lambda: recipe.reward,
        "optimize": recipe.optimize_config,
    }
    return makers[stage]()
