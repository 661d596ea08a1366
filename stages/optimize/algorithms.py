"""Algorithms as rows of a table: an advantage, a surrogate, an aggregation, and their defaults.

A variant is data, not a branch. The names are functions of `advantages.py`, `losses.py`,
`estimators.py` and `surrogates.py`. This module loads no torch, so checking a config and listing
the table are fast. A user's own row needs no edit here: put an `Algorithm` into a module and name
it in the recipe, `algorithm = "my_algo:ALGORITHM"` or `"my_algo.py:ALGORITHM"`; it may hold
functions instead of names. For a row that Quiver ships, the README beside this file lists what else
to write.

>>> find_algorithm("dapo").defaults["clip_high"]
0.28
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core import plugins

from . import contract


@dataclass(frozen=True)
class Algorithm:
    """One row of the table. `defaults` hold the surrogate's options and `drop_zero_variance`; the
    recipe's own values override them."""

    name: str
    advantage: str | Callable[..., Any]
    """(rewards [B], groups [B]) -> advantages [B]. It also gets, if it has arguments of these
    names, `lengths` [B] in tokens, and `parts` and `part_weights` [B, P] of the rewards."""
    surrogate: str | Callable[..., Any]
    """(Tokens, **options) -> token losses [N], at_bound [N] bool"""
    aggregation: str | Callable[..., Any]
    """(lengths [B], max_completion_tokens) -> weights [N] of the whole optimizer step. It also gets
    `groups` [B] if it has an argument of that name."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    paper: str = ""
    """Its URL."""
    description: str = ""
    zero_is_idle: bool = True
    """True if a token of advantage 0 has no gradient, so rollouts with advantage 0 need no pass
    (they still count in the denominators). Set it to False if your surrogate has a term beside the
    advantage."""
    advantage_of: Literal["rollouts", "turns", "tokens"] = "rollouts"
    """Unit that has its own advantage. turns, for `optimize.credit = "turn"`: `advantage` is
    (rewards [T], offsets [B+1], groups [B]) -> advantages [T], with T turns of all rollouts.
    tokens: (rewards [N], offsets [B+1]) -> advantages [N]; it also gets `groups` [B], `gamma` and
    `gae_lambda` if it has arguments of these names, and what it `needs`. Advantages of tokens are
    then whitened over the batch, unless the function takes `groups`."""
    needs: tuple[str, ...] = ()
    """Arguments of a per-token `advantage` that one pass before the first step provides: `logprobs`
    [N]; `collisions` [N], Σ p² over the vocabulary; `values` [N], from a value head that is trained
    beside the policy; `last_values` [B], values of the states after the last tokens. With `values`
    the function returns advantages [N] and returns [N]."""

    @property
    def has_critic(self) -> bool:
        """True if a value head is trained beside the policy."""
        return "values" in self.needs


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            "grpo",
            advantage="group_normalized",
            surrogate="clipped",
            aggregation="sequence_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2402.03300",
            description="advantage normalised in the group; each completion counts alike",
        ),
        Algorithm(
            "bnpo",
            advantage="group_normalized",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2506.02864",
            description="as grpo, but each token of the mini-batch counts alike (the paper's Beta "
            "normalisation is not part of it)",
        ),
        Algorithm(
            "dapo",
            advantage="group_normalized",
            surrogate="clipped",
            aggregation="token_mean",
            defaults={"clip_low": 0.2, "clip_high": 0.28, "drop_zero_variance": True},
            paper="https://arxiv.org/abs/2503.14476",
            description="token mean, more room upwards, groups of equal rewards left out",
        ),
        Algorithm(
            "dr_grpo",
            advantage="group_centered",
            surrogate="clipped",
            aggregation="constant",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2503.20783",
            description="no division by the standard deviation nor by the completion's length",
        ),
        Algorithm(
            "gdpo",
            advantage="part_normalized",
            surrogate="clipped",
            aggregation="sequence_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2601.05242",
            description="as grpo, but each part of the reward is normalised by itself before "
            "the weighted sum",
        ),
        Algorithm(
            "pass_at_k",
            advantage="pass_at_k",
            surrogate="clipped",
            aggregation="sequence_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2508.10751",
            description="as grpo, but what counts is the best of k answers, in the mean over "
            "all choices of k",
        ),
        Algorithm(
            "rloo",
            advantage="leave_one_out",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2402.14740",
            description="reward minus the mean of the others in the group",
        ),
        Algorithm(
            "gspo",
            advantage="group_normalized",
            surrogate="sequence_clipped",
            aggregation="sequence_mean",
            defaults={"clip_low": 3e-4, "clip_high": 4e-4},
            paper="https://arxiv.org/abs/2507.18071",
            description="as grpo, but the ratio, and so the clipping, is the whole completion's",
        ),
        Algorithm(
            "cispo",
            advantage="group_normalized",
            surrogate="cispo",
            aggregation="token_mean",
            defaults={"clip_max": 5.0},
            paper="https://arxiv.org/abs/2506.13585",
            description="the ratio is a bounded weight (clip_max is the bound itself), so no "
            "token loses its gradient",
        ),
        Algorithm(
            "sapo",
            advantage="group_normalized",
            surrogate="sapo",
            aggregation="sequence_mean",
            defaults={"tau_positive": 1.0, "tau_negative": 1.05},
            paper="https://arxiv.org/abs/2511.20347",
            description="a soft gate around ratio 1 in place of clipping",
        ),
        Algorithm(
            "reinforce_pp",
            advantage="batch_normalized",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2501.03262",
            description="advantage normalised over the batch; one rollout a prompt is enough",
        ),
        Algorithm(
            "reinforce_pp_baseline",
            advantage="batch_normalized_baseline",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2501.03262",
            description="reward minus the group's mean, scaled over the batch",
        ),
        Algorithm(
            "reinforce_pp_to_go",
            advantage="reward_to_go",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2501.03262",
            description="as reinforce_pp, but a token answers for the KL and the reward that "
            "come after it",
            advantage_of="tokens",
        ),
        Algorithm(
            "dppo",
            advantage="group_centered",
            surrogate="divergence_masked",
            aggregation="constant",
            defaults={"divergence": "tv", "divergence_low": 0.15, "divergence_high": 0.15},
            paper="https://arxiv.org/abs/2602.04879",
            description="a token is left out when its probability, not its ratio, has moved too "
            "far",
        ),
        Algorithm(
            "dppo_kl",
            advantage="group_centered",
            surrogate="divergence_masked",
            aggregation="constant",
            defaults={"divergence": "kl", "divergence_low": 0.05, "divergence_high": 0.05},
            paper="https://arxiv.org/abs/2602.04879",
            description="as dppo, but the distance is the KL of sampled token against all others",
        ),
        Algorithm(
            "gmpo",
            advantage="group_normalized",
            surrogate="geometric_clipped",
            aggregation="sequence_mean",
            defaults={"clip_low": 0.4, "clip_high": 0.4},
            paper="https://arxiv.org/abs/2507.20673",
            description="geometric mean of the tokens' ratios, each clipped in its logarithm",
        ),
        Algorithm(
            "luspo",
            advantage="group_normalized",
            surrogate="sequence_clipped",
            aggregation="sequence_sum",
            defaults={"clip_low": 2e-3, "clip_high": 2.5e-3},
            paper="https://arxiv.org/abs/2602.05261",
            description="as gspo, but a completion weighs by its length",
        ),
        Algorithm(
            "opo",
            advantage="length_weighted",
            surrogate="reinforce",
            aggregation="token_mean",
            defaults={},
            paper="https://arxiv.org/abs/2505.23585",
            description="reward minus the group's mean weighted by length; for strictly "
            "on-policy steps",
        ),
        Algorithm(
            "otb",
            advantage="optimal_token_baseline",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/2602.07078",
            description="a baseline for each token, weighted by what the tokens up to it weigh "
            "in the gradient",
            advantage_of="tokens",
            needs=("logprobs", "collisions"),
        ),
        Algorithm(
            "ppo",
            advantage="gae",
            surrogate="clipped",
            aggregation="token_mean",
            defaults=_CLIP,
            paper="https://arxiv.org/abs/1707.06347",
            description="a value head judges every token; one rollout a prompt is enough",
            advantage_of="tokens",
            needs=("values", "last_values"),
        ),
    )
}

_BOUNDS = ("clip_low", "clip_high", "dual_clip", "delta")
OPTIONS = {
    "clipped": _BOUNDS,
    "sequence_clipped": (*_BOUNDS, "token_form"),
    "cispo": ("clip_max",),
    "sapo": ("tau_positive", "tau_negative"),
    "divergence_masked": (
        "divergence",
        "divergence_low",
        "divergence_high",
        "ratio_max",
        "drift_coef",
    ),
    "geometric_clipped": ("clip_low", "clip_high"),
    "reinforce": (),
}
"""Options of each surrogate, so that a recipe is checked without loading torch."""
_MORE = {"advantages": "estimators", "losses": "surrogates"}
"""Second module for functions that are not in the first."""


def find_algorithm(name: str) -> Algorithm:
    """Return the row called `name`, or the `Algorithm` at `module:NAME` or `file.py:NAME`, whose
    own functions are then checked by `contract`. Raises ConfigError."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    row, _ = plugins.load(name, "optimize.algorithm", Algorithm)
    problem = contract.problem_of(row)
    named = [known for known in ALGORITHMS.values() if known.advantage == row.advantage]
    # An advantage that ships with Quiver keeps its unit and what it needs.
    for known in named[:1]:
        if (known.advantage_of, {*known.needs}) != (row.advantage_of, {*row.needs}):
            problem = problem or (
                f"expected the advantage {known.advantage} to be of {known.advantage_of}, with "
                f"needs {known.needs}"
            )
    if problem:
        raise ConfigError(f"optimize.algorithm {name}", problem, next="correct the algorithm's row")
    functions = {}
    for role in ("advantage", "surrogate", "aggregation"):
        function = getattr(row, role)
        if callable(function):
            kind = row.advantage_of if role == "advantage" else role
            functions[role] = contract.checked(f"{name} {role}", kind, function, row.needs)
    return dataclasses.replace(row, **functions)


def find_function(module: str, chosen: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that a row names: `chosen` itself, or the function of that name in
    `advantages` and `estimators`, or in `losses` and `surrogates`. Raises ConfigError."""
    if callable(chosen):
        return chosen
    for name in (module, _MORE[module]):
        functions = importlib.import_module(f"quiver.stages.optimize.{name}")
        function = getattr(functions, chosen, None)
        if inspect.isfunction(function):
            return function
    raise ConfigError(
        "optimize.algorithm",
        f"expected a function or the name of one of {module}.py, found {printable(repr(chosen))}",
        next="correct the algorithm's row",
    )
