"""Which algorithm a name means, and which fields of `[optimize]` it reads; fields without effect
are refused.

No torch is loaded here, and no code of a user's runs.

    check_options(ALGORITHMS["grpo"], {"clip_high": 0.3})
    check_advantage("pass_at_k", {"k": 4})
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from inspect import signature

from quiver.schemas.errors import did_you_mean
from quiver.stages.common import plugins

from .algorithms import ALGORITHMS, OPTIONS, Algorithm

ADVANTAGE_OPTIONS = {
    "group_normalized": ("epsilon",),
    "batch_scaled": ("epsilon",),
    "part_normalized": ("epsilon",),
    "pass_at_k": ("k", "epsilon"),
    "batch_normalized": ("epsilon",),
    "batch_normalized_baseline": ("epsilon",),
}
"""Options of each advantage that has any."""
ADVANTAGE_FIELDS = {"epsilon": "advantage_epsilon", "k": "pass_k"}
"""Config field of each option of an advantage."""
CRITIC_OPTIONS = (
    "critic",
    "value_coef",
    "value_clip",
    "gamma",
    "gae_lambda",
    "critic_lambda",
    "reward_scaling",
    "bootstrap_length",
    "critic_learning_rate",
    "critic_warmup_steps",
)
"""Fields that only an algorithm with a critic reads."""


def check_name(name: str) -> str:
    """Return `name` if it is in the table or a dotted path; otherwise raise ValueError with the
    nearest name."""
    if name in ALGORITHMS or ":" in name:
        return name
    raise ValueError(
        "expected a name that quiver algorithms lists, or module:NAME or file.py:NAME of your own"
        f"{did_you_mean(name, ALGORITHMS)}"
    )


def source_hash(name: str) -> str:
    """Return a fingerprint of the file behind a dotted path, so that an edited algorithm gets
    another run key; empty for table rows. No code of a user's runs. Raises ConfigError."""
    if name in ALGORITHMS:
        return ""
    return plugins.fingerprint(plugins.locate(name, "optimize.algorithm", Algorithm.__name__))


def check_options(row: Algorithm, options: Iterable[str]) -> None:
    """Raise ValueError for an option that the surrogate of `row`, one of the table, does not take.
    The options of a user's own algorithm are checked when its surrogate is loaded."""
    accepted = OPTIONS[row.surrogate]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        raise ValueError(
            f"{unknown[0]} is no option of algorithm {row.name!r}: leave it out; it takes "
            f"{', '.join(accepted)}"
        )


def check_advantage(advantage: str, options: Iterable[str]) -> None:
    """Raise ValueError for an option that this `advantage` does not take."""
    for name in sorted(set(options) - set(ADVANTAGE_OPTIONS.get(advantage, ()))):
        takers = [other for other, names in ADVANTAGE_OPTIONS.items() if name in names]
        raise ValueError(
            f"{ADVANTAGE_FIELDS[name]} would have no effect: the advantage is {advantage!r}. "
            f"Leave it out, or take one of {', '.join(takers)}"
        )


def check_effect(row: Algorithm, changed: Mapping[str, object]) -> None:
    """Raise ValueError for changed critic options if `row` has no critic. `gamma` is also an option
    of the reward to go; a user's advantage of tokens takes those that its parameters name.

    `changed` maps each of the `CRITIC_OPTIONS` that differs from its default to that default, so
    one recipe with the defaults written out works with every algorithm.
    """
    if callable(row.advantage) and row.advantage_of == "tokens":
        accepted = {"gamma", "gae_lambda"} & signature(row.advantage).parameters.keys()
    else:
        accepted = {"gamma"} if row.advantage == "reward_to_go" else set()
    changed = {name: default for name, default in changed.items() if name not in accepted}
    if row.critic or not changed:
        return
    with_critic = [algorithm.name for algorithm in ALGORITHMS.values() if algorithm.critic]
    defaults = [
        f"{name} = {json.dumps(value)}" for name, value in changed.items() if value is not None
    ]
    or_default = f" (or at the default: {', '.join(defaults)})" if defaults else ""
    raise ValueError(
        f"{', '.join(changed)} would have no effect: algorithm {row.name!r} has no critic. Leave "
        f"out what has no effect{or_default}, or take an algorithm with a critic: "
        f"{', '.join(with_critic)}"
    )
