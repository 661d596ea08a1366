"""The contract of a stage.

A stage is a module with

    Config                                      its section of a recipe
    plan(config, store, refs, into) -> Plan     the versions it would make, and their run key
    make(plan, writers)                         the work: writes shards and metrics

`plan` imports no torch and starts no process. Once a config is resolved, it reads no data source
and runs no user code, and uses no network but the store's. A stage knows nothing of leases or
Prefect: `runner` finds finished versions, holds the lease, and publishes the result. Two stages ask
something about their process: optimize, which rank it is (RANKS), and generate, whether it may stay
resident (`stage_process`). Asking a writer for a shard may raise CommittedByOther, if another
process has finished the version; `make` must not catch it.

A plan's `inputs` are the versions that the run key counts with their whole content. Its `models`
are manifest entries of the policies and reward models that compute, or whose numbers are read: the
run key counts only their hashes of weights, tokenizer, template and image processor, and a stage
may blank one (prompt: the weights). Optimize's policy is in both, since training also continues
from its optimizer state.

A stage may also have

    resolve(config) -> config                   read what the recipe names outside the store, once
                                                (called by `plan`, and by `Recipe.resolved`)
    check(config, columns, prompts)             try out what `make` will need (`check_stages`, and
                                                `quiver check`)
    import_ahead(config)                        import what `make` needs, before its call arrives
                                                (the child process)
    accept(plan, version)                       refuse a finished version for a key of the config
                                                outside the run key, such as reward's `max_invalid`
                                                (`runner`)
    SHARED = True                               equal calls may divide its shards among them
    RANKS = True                                the ranks of torch.distributed do one call together

Code of rewards, engines and environments is hashed in each `plan`, and reward's models too, so that
a function edited during a run makes a new version. A user's algorithm, or a function that makes
rows or the base model, is hashed once, by `resolve`; if it has changed since, `make` raises
ConfigError. Processes that share (SHARED) all have writers, and one of them publishes. Of ranks
(RANKS) only rank 0 has writers.

`check` is called before the first rollouts are paid for, and again if later prompts have another
form. It takes no plan, because the plan of reward names rollouts and the plan of optimize names
rewards, and neither exists yet. Known at that time are the config and the prompts: their columns,
which are a function's arguments, and the text with which the chat template starts an answer.

To add a stage, write

    stages/NAME/stage.py                the module, and its row of MODULES in stages/__init__.py
    schemas/KIND.py, schemas/refs.py    for each new kind a schema, and its entry of KINDS
    flows/recipe.py                     its section, and a method that makes its Config
    flows/sections.py                   its pool's key in Placement; its name in StageName, unless
                                        it is in CHAIN
    flows/post_train.py                 its call by `perform`; in CHAIN if `--from` accepts it
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from quiver.schemas.errors import ConfigError
from quiver.schemas.manifest import Manifest
from quiver.stages import MODULES
from quiver.stages.core.config import Config, parse
from quiver.stages.core.store import Store
from quiver.stages.core.store.plan import Plan

Refs = Mapping[str, str | list[str]]
"""References by role; a role that accepts several versions holds a list."""


class Stage(Protocol):
    """The type of a stage module; its optional members are listed at the top of this file."""

    Config: type[Config]

    def plan(self, config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
        """Return the plan of a call. Raises ConfigError, LineageError or SchemaError."""

    def make(self, plan: Plan, writers: Mapping[str, Any]) -> None:
        """Write every shard of every kind, and finish each writer.

        Args:
            writers: writers by kind. Empty for a rank that shares the work without writing.
        """


def load_stage(name: str) -> Stage:
    """Return the module of a stage. Raises ConfigError if there is no such stage."""
    if name not in MODULES:
        raise ConfigError(
            f"stage {name}", f"expected one of {', '.join(MODULES)}", next="name a stage"
        )
    return importlib.import_module(MODULES[name])


def is_made_alike(first: Manifest, second: Manifest) -> bool:
    """Return True if one stage made both with one config, ignoring inputs and the keys outside the
    run key (`Runtime`).

    False if the config has a key that this version of Quiver does not know.
    """
    if (first.stage, first.stage_version) != (second.stage, second.stage_version):
        return False
    if first.config == second.config:
        return True
    if first.stage not in MODULES:
        return False
    config_class = load_stage(first.stage).Config
    try:
        keys = [parse(config_class, each.config, each.ref).key() for each in (first, second)]
    except ConfigError:
        return False
    return keys[0] == keys[1]
