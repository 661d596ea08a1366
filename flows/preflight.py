"""Checks of a recipe before anything runs: its paths, columns and names.

Look here for what `quiver check` and `quiver run` refuse. Nothing is written, and no torch, Prefect
or child process is needed. `quiver run` does these checks first. `quiver check` does them too, and
then takes the first rows through the stages (`first_rows`).

    recipe = preflight(load("recipe.toml"))        # resolved; ConfigError says what is wrong
    try_out(recipe)                                # finds what only trying can show
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, QuiverError, printable, reason
from quiver.schemas.plain import flatten
from quiver.stages.common import plugins
from quiver.stages.common.chat.template import read_template
from quiver.stages.common.config import parse
from quiver.stages.common.models.from_function import is_function
from quiver.stages.common.runtime.call import Call
from quiver.stages.common.runtime.runner import find, plan_of
from quiver.stages.common.runtime.stage import Plan, load
from quiver.stages.common.store import Store, Version
from quiver.stages.generate.engine import code_hash, engine_options
from quiver.stages.reward.preview import preview
from quiver.stages.reward.turns import ENVIRONMENT

from .demands import check_demands
from .placement import check_placement, trained_here
from .recipe import Recipe

log = logging.getLogger(__name__)


def preflight(recipe: Recipe) -> Recipe:
    """Check a recipe and return it resolved.

    Sources are read and the model's files hashed. A hub is asked only if the recipe names one.

    Raises:
        ConfigError: If a key, path, column or name is wrong.
        SecurityError: If a file must not be used.
        CorruptError: If the store is damaged.
        ResourceError: If the store cannot be used.
    """
    recipe.data.require_filled_in()
    check_placement(recipe)
    check_demands(recipe)
    _store_at(recipe.store)
    read_template(recipe.prompt.template, "prompt.template")
    if is_function(recipe.policy.model):
        plugins.definition(recipe.policy.model, "policy.model")
    for evaluation in {False, recipe.data.held_out is not None}:
        generate = recipe.generate_config(0, evaluation=evaluation)
        options = engine_options(generate.engine, generate.options)
        if options is None:
            plugins.definition(generate.engine, "generate.engine", "class")
        code_hash(generate.engine, options)
        for code in generate.turns.own_code() if generate.turns else ():
            plugins.definition(*code)
    for stage, config in trained_here(recipe).items():
        load(stage).check(config, ())
    _require_turn_rewards(recipe)
    resolved = recipe.resolved()
    for columns in resolved.columns.values():
        preview(resolved.reward, [*columns, *resolved.offered_columns])
    return resolved


def _require_turn_rewards(recipe: Recipe) -> None:
    """Raise ConfigError if the recipe uses an environment's rewards and would get none."""
    credit = recipe.optimize.credit
    turns = recipe.generate.turns
    uses_environment = ENVIRONMENT in [each.use for each in recipe.reward.functions]
    if uses_environment and (turns is None or not turns.environment):
        who = "generate.turns.tools pay nothing" if turns else "there is no [generate.turns]"
        raise ConfigError(
            f"reward.functions {ENVIRONMENT}",
            f"takes what an environment pays, and {who}",
            next="name a generate.turns.environment, or another reward function",
        )
    if credit != "rollout" and not uses_environment:
        raise ConfigError(
            f"optimize.credit {credit}",
            "needs the rewards of turns, which no reward function takes from the environment",
            next=f'add a reward function with use = "{ENVIRONMENT}", or set '
            'optimize.credit = "rollout"',
        )


def try_out(recipe: Recipe) -> list[str]:
    """Run the `check` of each remaining stage on a resolved recipe, and return the names of the
    stages.

    A check starts processes, loads scorers and asks servers. Raises ConfigError or RemoteError.
    """
    of_data = recipe.columns["data"]
    for columns in recipe.columns.values():
        if columns != of_data:
            load("reward").check(recipe.reward, [*columns, *recipe.offered_columns])
    trained = trained_here(recipe)
    for stage, config in trained.items():
        load(stage).check(config, [*of_data, *recipe.offered_columns])
    played = [] if recipe.generate.turns is None else ["generate"]
    return [*played, "reward", *trained]


def finished(recipe: Recipe) -> dict[str, str]:
    """Return the finished versions of a resolved recipe's first iteration, by stage.

    A run continues after the last of them. A version that exists but was made with other settings
    is logged. Raises ConflictError if the run starts from another base model.
    """
    refs: dict[str, str] = {}
    if _store_at(recipe.store) is None:
        return refs
    chain = {
        "policy": ("policy", recipe.policy, ()),
        "prompt": ("prompts", recipe.prompt_config(1), ("policy",)),
        "generate": ("rollouts", recipe.generate_config(1), ("prompts", "policy")),
        "reward": ("rewards", recipe.reward, ("rollouts",)),
    }
    made: dict[str, str] = {}
    for stage, (kind, config, roles) in chain.items():
        inputs = {role: made[role] for role in roles}
        plain = config.model_dump(mode="json")
        call = Call(stage, plain, recipe.store, inputs, into=recipe.run)
        outcome = find(call)
        if outcome is None:
            _tell_what_differs(plan_of(call), kind)
            break
        made[kind] = outcome.ref
        refs[stage] = outcome.ref
    return refs


def made_policy(recipe: Recipe) -> Version | None:
    """Return the base model of a resolved recipe if a run in its store has made it, else None."""
    store = _store_at(recipe.store)
    if store is None:
        return None
    config = recipe.policy.model_dump(mode="json")
    plan = plan_of(Call("policy", config, recipe.store, into=recipe.run))
    policies = (store.find(run, "policy", plan.run_key) for run in [plan.run, *store.runs()])
    return next(filter(None, policies), None)


def _tell_what_differs(plan: Plan, kind: str) -> None:
    """Warn with the keys that differ if the run has a first version of `kind` made with other
    settings."""
    numbers = plan.store.numbers(plan.run, kind)
    if not numbers:
        return
    with suppress(QuiverError):  # A deleted or damaged version is not this function's concern.
        version = plan.store.open(f"{plan.run}/{kind}@{numbers[0]}")
        manifest = version.manifest
        saved = parse(load(manifest.stage).Config, manifest.config, str(version.ref))
        before, asked = (  # An empty table shows by the keys it lacks.
            {path: leaf for path, leaf in flatten(config.key()).items() if leaf != {}}
            for config in (saved, plan.config)
        )
        changes = [
            f"{path} was {_in_words(before.get(path))} and is {_in_words(asked.get(path))}"
            for path in asked | before
            if before.get(path) != asked.get(path)
        ]
        log.warning(
            "run %s has %s, which this recipe does not ask for: %s. The run makes versions of its "
            "own beside it; to keep them apart, give the run another name: --set run=NAME",
            plan.run,
            version.ref,
            ", ".join(changes) or "what it was made of changed",
        )


def _in_words(leaf: Any) -> str:
    return "not set" if leaf is None else printable(leaf)


def _store_at(path: str) -> Store | None:
    """Return the store at `path`, or None if none exists yet and one can be made. Raises
    ConfigError otherwise."""
    try:
        folder = Path(path).expanduser().absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            return Store(folder)  # Its error names what else is in the folder.
        parent = next(above for above in (folder, *folder.parents) if above.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"nothing can be made in {parent}")
        if not os.statvfs(parent).f_blocks:  # /proc, for example, permits what it cannot do.
            os.rmdir(tempfile.mkdtemp(dir=parent))
    except QuiverError:
        raise
    except (OSError, RuntimeError) as error:  # pathlib raises RuntimeError for an unknown home.
        raise ConfigError(
            f"store {printable(path)}",
            f"cannot be used: {reason(error)}",
            next="name another folder in --store",
        ) from None
    return None
