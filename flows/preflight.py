"""Checks of a recipe before anything runs: its paths, columns and names, servers and devices.

Look here for what `quiver check` and `quiver run` refuse. Nothing is written, and no torch, Prefect
or child process is needed. `quiver run` does these checks first. `quiver check` does them too, and
then takes the first rows through the stages (`first_rows`).

    recipe = preflight(load("recipe.toml"))        # resolved; ConfigError says what is wrong
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, QuiverError, printable, reason
from quiver.stages.core import plugins
from quiver.stages.core.config import parse
from quiver.stages.core.run.call import Call
from quiver.stages.core.run.runner import find_outcome, plan_of
from quiver.stages.core.run.stage import Plan, load_stage
from quiver.stages.core.servers import secret
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.places import is_url, locate, open_storage
from quiver.stages.generate.engine import code_hash, engine_options, require_decoder
from quiver.stages.generate.options import VllmServerOptions
from quiver.stages.logprobs.stage import require_tokens_of
from quiver.stages.model.chat.template import read_template
from quiver.stages.model.checkpoints import PolicyConfig, model_config, model_entry
from quiver.stages.model.devices import engine_gpus
from quiver.stages.model.families import require_language_model
from quiver.stages.model.from_function import is_function
from quiver.stages.optimize.checks import refuse_scripted
from quiver.stages.optimize.classifier import find_classifier
from quiver.stages.reward.preview import preview
from quiver.stages.reward.turns import ENVIRONMENT

from .placement import check_places, check_resident, runs_here
from .recipe import Recipe
from .sections import Data, Evaluate, Generate
from .slots import require_gpus

log = logging.getLogger(__name__)
_MOST_SHOWN = 60
"""Characters of a setting in a warning."""


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
    check_resident(recipe.placement, recipe.generate, recipe.optimize, recipe.media)
    check_places(recipe.placement, recipe.store)
    check_demands(recipe)
    _store_at(recipe.store)
    if recipe.optimize.kl_coef > 0:
        recipe.kl_reference()
    read_template(recipe.prompt.template, "prompt.template")
    if is_function(recipe.policy.model):
        plugins.definition(recipe.policy.model, "policy.model")
    refuse_scripted("generate.engine scripted", recipe.generate.engine, recipe.optimize_config())
    if runs_here(recipe.placement, "optimize"):
        load_stage("optimize").check(recipe.optimize_config(), ())
    credit = recipe.optimize.credit
    turns = recipe.generate.turns
    uses_environment = ENVIRONMENT in [function.use for function in recipe.reward.functions]
    if uses_environment and (turns is None or not turns.environment):
        missing = "generate.turns.tools give none" if turns else "there is no [generate.turns]"
        raise ConfigError(
            f"reward.functions {ENVIRONMENT}",
            f"takes the rewards of an environment, and {missing}",
            next="name a generate.turns.environment, or another reward function",
        )
    if credit != "rollout" and not uses_environment:
        raise ConfigError(
            f"optimize.credit {credit}",
            "needs the rewards of turns, which no reward function takes from the environment",
            next=f'add a reward function with use = "{ENVIRONMENT}", or set '
            'optimize.credit = "rollout"',
        )
    resolved = recipe.resolved()
    for columns in resolved.columns.values():
        preview(resolved.reward, [*columns, *resolved.offered_columns])
    return resolved


def check_base(recipe: Recipe, open: Callable[[str], Version], policy: Version) -> None:
    """Check that a recipe can train its base model, before rollouts are paid for.

    No weights are read.

    Args:
        recipe: The recipe.
        open: Opens a version of its store.
        policy: The base model.

    Raises:
        ConfigError: If an engine, adapters or the critic do not fit it.
        LineageError: If the KL term's reference reads other tokens.
    """
    require_language_model(model_config(policy), str(policy.ref))
    check_engines(recipe.data, recipe.generate, recipe.evaluate, policy)
    config = recipe.optimize_config()
    find_classifier(config, open, policy)
    if config.lora and runs_here(recipe.placement, "optimize"):
        from quiver.stages.optimize.lora import require_layers

        require_layers(config.lora, policy)
    named = recipe.kl_reference() if config.kl_coef > 0 else None
    if named not in (None, f"{recipe.run}/policy@0"):
        sampler = model_entry("policy", policy)
        reference = open(named)
        if reference.mark is None:  # An expired reference has no tokenizer left.
            config = recipe.logprobs.for_role("ref")
            require_tokens_of(config, sampler, lambda _: policy, reference)


def check_engines(data: Data, generate: Generate, evaluate: Evaluate, policy: Version) -> None:
    """Raise ConfigError if an engine of the recipe cannot sample from a model like `policy`."""
    require_decoder(generate.engine, policy, "generate")
    if data.held_out is not None:
        engine = evaluate.generate.get("engine", generate.engine)
        require_decoder(engine, policy, "evaluate.generate")


def check_demands(recipe: Recipe) -> None:
    """Raise ConfigError if code that samples is missing, or if a stage that runs here could not
    begin. The needs of stages in pools are checked there."""
    elsewhere = recipe.placement.pools
    lora = recipe.optimize.lora
    for evaluation in {False, recipe.data.held_out is not None}:
        config = recipe.generate_config(1, evaluation=evaluation)
        options = engine_options(config.engine, config.options)
        section = "evaluate.generate" if evaluation else "generate"
        if options is None:
            plugins.definition(config.engine, f"{section}.engine", "class")
        code_hash(config.engine, options)
        for code in config.turns.own_code() if config.turns else ():
            plugins.definition(*code)
        if "generate" in elsewhere:
            continue
        if isinstance(options, VllmServerOptions):
            secret(options.token, f"{section}.options.token")
            num_policies = 2 if evaluation else recipe.iterations
            is_adapter = lora is not None and lora.save == "adapter"
            problem = advice = ""
            if recipe.media:
                problem = "prompts with pictures or clips are not sent to servers"
                advice = 'set generate.engine = "transformers"'
            elif is_adapter and num_policies > 1:
                problem = (
                    "a policy that is an adapter alone has no weights that a server could load"
                )
                advice = 'set optimize.lora.save = "merged"'
            elif num_policies > 1 and not options.wait_seconds:
                problem = (
                    f"{num_policies} policies need servers one after another, but wait_seconds is 0"
                )
                advice = f"set {section}.options.wait_seconds to as long as a server takes to start"
            if problem:
                raise ConfigError(f"{section}.engine vllm-server", problem, next=advice)
        devices = recipe.placement.devices
        needed = engine_gpus(config.options)
        if isinstance(devices, int) and config.engine == "vllm" and devices < needed:
            raise ConfigError(
                "placement.devices",
                f"one engine needs {needed} GPUs by generate.options, got {devices}",
                next=f"set placement.devices to {needed} or a multiple of it",
            )
        require_gpus(Call("generate", config.model_dump(mode="json"), recipe.store))
    if "optimize" not in elsewhere:
        config = recipe.optimize_config().model_dump(mode="json")
        require_gpus(Call("optimize", config, recipe.store))


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
    versions: dict[str, str] = {}
    for stage, (kind, config, roles) in chain.items():
        inputs = {role: versions[role] for role in roles}
        plain = config.model_dump(mode="json")
        call = Call(stage, plain, recipe.store, inputs, into=recipe.run)
        outcome = find_outcome(call, expired=True)
        if outcome is None:
            plan = plan_of(call, Store(recipe.store).with_expired())
            _tell_what_differs(plan, kind)
            break
        versions[kind] = outcome.ref
        refs[stage] = outcome.ref
    return refs


def made_policy(policy: PolicyConfig, path: str, run: str) -> Version | None:
    """Return the base model, as resolved, if a run in the store at `path` has made it, else None.

    `run` is looked at first.
    """
    store = _store_at(path)
    if store is None:
        return None
    plan = plan_of(Call("policy", policy.model_dump(mode="json"), path, into=run))
    policies = (store.find(name, "policy", plan.run_key) for name in [plan.run, *store.runs()])
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
        saved = parse(load_stage(manifest.stage).Config, manifest.config, str(version.ref))
        changes = [*_changes(saved.key(), plan.config.key())] or ["its inputs changed"]
        log.warning(
            "run %s has %s, made with other settings than this recipe's. The run adds its own "
            "versions to these; to keep them apart, give the run another name: --set run=NAME%s",
            plan.run,
            version.ref,
            "".join(f"\n  {change}" for change in changes),
        )


def _changes(before: Any, asked: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each key that differs. A table that only one side has is one line, and long
    values are cut."""
    tables = [_as_table(side) for side in (before, asked)]
    if None not in tables:
        for key in tables[1] | tables[0]:
            place = f"{path}.{key}" if path else key
            yield from _changes(tables[0].get(key), tables[1].get(key), place)
    elif before != asked and {} not in (before, asked):  # an empty table differs by its keys
        was, now = (
            "not set" if side is None else printable(side, _MOST_SHOWN) for side in (before, asked)
        )
        yield f"{path} was {was} and is {now}"


def _as_table(value: Any) -> dict[Any, Any] | None:
    """Return a table itself, a list of tables by position, and None for anything else."""
    if isinstance(value, list) and all(isinstance(member, dict) for member in value):
        return dict(enumerate(value))
    return value if isinstance(value, dict) else None


def _store_at(path: str) -> Store | None:
    """Return the store at `path`, or None if none exists yet and one can be made. Raises
    ConfigError otherwise."""
    if is_url(path):
        return Store(path) if open_storage(locate(path)).list("") else None
    try:
        folder = Path(path).expanduser().absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            return Store(folder)  # Its error names what else is in the folder.
        parent = next(above for above in (folder, *folder.parents) if above.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"cannot create files in {parent}")
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
