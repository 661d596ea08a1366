"""The contract of a stage, and the plan that it makes.

A stage is a module with

    Config                                      its section of a recipe
    plan(config, store, refs, into) -> Plan     what it would make, under which key
    make(plan, writers)                         the work: shards in, metrics out

`plan` imports no torch and starts no process; once a config is resolved it asks no network, reads
no source and runs no code of a user's. A stage knows no process, no lease and no Prefect: `runner`
finds what is finished, holds the lease, and publishes what was made. Asking a writer for a shard
may raise CommittedByOther, where another process has finished the version: `make` lets it pass.

A stage may also have

    resolve(config) -> config                   read what the recipe names outside the store, once
    check(config, columns, prompts)             what only trying can tell, before any generation
    prepare(config)                             import what `make` needs, before its call is there
    accept(plan, version)                       refuse a finished version that `max_invalid`, as it
                                                is today, rules out
    SHARED = True                               several processes can do its shards together
    RANKS = True                                under torch.distributed all ranks do its work

Those are asked for with `getattr`. `plan` resolves itself what is not resolved. `check` is called
once a run, before its first rollouts are paid for. It takes no plan: that of reward names rollouts,
and that of optimize rewards, which are not there yet. What is known then is the config, and the
prompts: their columns, which are a function's arguments, and how answers begin.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from quiver.schemas.errors import ConfigError
from quiver.schemas.manifest import Manifest, Model, digest
from quiver.stages.common.config import Config, parse
from quiver.stages.common.store import Store, Version

Refs = Mapping[str, str | list[str]]
"""References by role; a role of which several versions may be given holds a list."""
MODULES = {
    "policy": "quiver.stages.common.models.checkpoints",
    "prompt": "quiver.stages.prompt.stage",
    "generate": "quiver.stages.generate.stage",
    "branch": "quiver.stages.generate.turns.branch",
    "imported": "quiver.stages.generate.imported",
    "imported_rewards": "quiver.stages.reward.imported",
    "reward": "quiver.stages.reward.stage",
    "override": "quiver.stages.reward.override",
    "logprobs": "quiver.stages.logprobs.stage",
    "average": "quiver.stages.logprobs.average",
    "optimize": "quiver.stages.optimize.stage",
    "evaluate": "quiver.stages.evaluate.stage",
}
"""Where each stage is. They are named, not imported: no stage knows another."""


@dataclass(frozen=True)
class Plan:
    """What a call of a stage comes to: which versions it makes, of what, under which key."""

    store: Store
    stage: str
    stage_version: int
    config: Config
    """With all that was left open filled in, as the manifest will say it."""
    run: str
    """Run that the new versions belong to."""
    kinds: tuple[str, ...]
    """Kinds that it makes, published in this order; the last one is what the call returns."""
    inputs: Mapping[str, Version] = field(default_factory=dict)
    """Versions that it reads, by role, in the manifest's order."""
    models: tuple[Model, ...] = ()
    """Models that take part, by their hashes."""
    first_number: int = 1
    """Number of the version where its run has none of the last kind yet."""
    only_number: int | None = None
    """The one number that it may have, unless it is forced. None: the next free one."""
    if_number_taken: str = ""
    """What is wrong where another version has that number."""
    already_made: Version | None = None
    """A version that answers the call without any work, whatever its key."""
    patience_seconds: float | None = None
    """Processes that share the work: how long an idle one waits for another's shard."""

    @cached_property
    def run_key(self) -> str:
        """Hash of all that decides the outcome: stage, its version, config without runtime knobs,
        content of inputs and models."""
        hashes = {role: version.manifest.content_hash for role, version in self.inputs.items()}
        models = {model.role: model.hashes for model in self.models}
        return digest(
            {
                "stage": [self.stage, self.stage_version],
                "config": self.config.key(),
                "inputs": hashes,
                "models": models,
            }
        )

    @property
    def name(self) -> str:
        """What errors call it."""
        return f"{self.run}/{self.kinds[-1]}"

    def manifest_fields(self) -> dict[str, Any]:
        """What the manifest of each of its versions says of where it came from."""
        return {
            "stage": self.stage,
            "stage_version": self.stage_version,
            "run_key": self.run_key,
            "config": self.config.model_dump(mode="json"),
            "inputs": tuple(version.as_input(role) for role, version in self.inputs.items()),
            "models": self.models,
        }


class Stage(Protocol):
    """A module that is a stage; what it may have besides stands at the top of this file."""

    Config: type[Config]

    def plan(self, config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
        """What the call comes to. ConfigError, LineageError, SchemaError for what cannot be."""

    def make(self, plan: Plan, writers: Mapping[str, Any]) -> None:
        """Write every shard of every kind, and finish each writer. `writers`, by kind: none for a
        rank that takes part in the work and does not write."""


def load(name: str) -> Stage:
    """The module of a stage. ConfigError where there is no stage of that name."""
    if name not in MODULES:
        raise ConfigError(
            f"stage {name}", f"expected one of {', '.join(MODULES)}", next="name a stage"
        )
    return importlib.import_module(MODULES[name])


def plan_call(
    name: str, config: Mapping[str, Any], store: Store, refs: Refs, into: str | None
) -> Plan:
    """The plan of stage `name` for a config in plain JSON."""
    stage = load(name)
    parsed = parse(stage.Config, dict(config), f"stage {name}")
    return stage.plan(parsed, store, _RequiredRefs(name, refs), into)


class _RequiredRefs(dict):
    """References by role; ConfigError names the one that a stage asks for and was not given."""

    def __init__(self, stage: str, refs: Refs) -> None:
        super().__init__(refs)
        self._stage = stage

    def __missing__(self, role: str) -> str:
        raise ConfigError(f"stage {self._stage}", f"no {role} are given", next=f"name the {role}")


def is_made_alike(first: Manifest, second: Manifest) -> bool:
    """Whether one stage made both, with the same config but for runtime knobs; of whatever
    inputs."""
    if (first.stage, first.stage_version) != (second.stage, second.stage_version):
        return False
    if first.config == second.config:
        return True
    if first.stage not in MODULES:
        return False
    config_class = load(first.stage).Config
    keys = [parse(config_class, each.config, each.ref).key() for each in (first, second)]
    return keys[0] == keys[1]
