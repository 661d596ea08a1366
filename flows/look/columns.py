"""Values of versions' configs, for the columns of `quiver ls --columns` and `--differing`."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.schemas.plain import flatten
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import read_fields
from quiver.stages.core.threads import map_in_threads

Leaves = dict[str, Any]
"""Values of a config by stage and dotted key: `optimize.algorithm`, `reward.functions.0.use`."""


def configs_of(store: Store, refs: Iterable[Ref]) -> list[Leaves]:
    """Return the config of each version; empty if its manifest is damaged or missing."""

    # most versions of a run share their config with others
    @cache
    def leaves_of(stage: str, config: str) -> Leaves:
        return flatten(json.loads(config), stage)

    def read(ref: Ref) -> Leaves:
        fields = read_fields(store.storage, ref)
        return leaves_of(fields["stage"], json.dumps(fields["config"])) if fields else {}

    return map_in_threads(read, refs)


def differing(configs: Sequence[Leaves]) -> list[str]:
    """Return the keys whose values differ between versions of one stage, in the configs' order."""
    values: dict[str, set[str]] = defaultdict(set)
    num_having: Counter[str] = Counter()
    num_of_stage: Counter[str] = Counter()
    for config in {id(config): config for config in configs}.values():
        num_of_stage.update({key.partition(".")[0] for key in config})
        num_having.update(config.keys())
        for key, value in config.items():
            values[key].add(repr(value))
    return [
        key
        for key in values
        if len(values[key]) > 1 or num_having[key] < num_of_stage[key.partition(".")[0]]
    ]


def picked(configs: Sequence[Leaves], names: Sequence[str]) -> list[Leaves]:
    """Return of each config the values of the named keys that it has.

    A name is a whole key, or its end: `learning_rate`, `sampling.temperature`. Raises ConfigError
    if no config has it, or one has several keys that end so.
    """
    known = {key for config in configs for key in config}
    ends = {
        name: {name} & known or {key for key in known if key.endswith(f".{name}")} for name in names
    }
    for name, keys in ends.items():
        for config in configs:
            fitting = sorted(keys & config.keys())
            if len(fitting) > 1:
                problem = f"several keys end so: {', '.join(map(printable, fitting))}"
                raise ConfigError(f"--columns {printable(name)}", problem, next="name a whole key")
        if not keys:
            leaves = {key.rpartition(".")[2] for key in known}
            problem = f"no version here has this key{did_you_mean(name, sorted(leaves))}"
            raise ConfigError(f"--columns {printable(name)}", problem, next="quiver keys")
    return [
        {name: config[key] for name, keys in ends.items() for key in keys if key in config}
        for config in configs
    ]
