"""What the oracle tests share: one random ragged batch, flat as here and padded as TRL and verl
have it, and our step's loss.

`make oracle` installs both peers into `.oracles`; without them the tests skip. Nothing of theirs is
restated: their own functions are called on the padded batch, and loss and gradient are compared in
float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize import losses
from quiver.stages.optimize.algorithms import find_function

DOCUMENT = (Path(__file__).parents[2] / "deployments/docs/who-does-what.md").read_text()
"""Names the versions of TRL and verl."""
LENGTHS = torch.tensor([3, 1, 7, 5, 2, 4, 6, 2])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
MAX_TOKENS = 9
B, T, N = len(LENGTHS), int(LENGTHS.max()), int(LENGTHS.sum())
OFFSETS = Ragged.from_lengths(torch.zeros(N), LENGTHS).offsets
MASK = (torch.arange(T) < LENGTHS[:, None]).double()
JUNK = -1.7
"""What the padding holds: a peer that looked at it would be seen to."""


def peer(module: str) -> ModuleType:
    """The module of TRL or verl; the calling test module is skipped where that is not installed."""
    library = module.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: make oracle", allow_module_level=True)
    return importlib.import_module(module)


def noise(seed: int, scale: float = 1.0, count: int = N) -> torch.Tensor:
    """[count] float64."""
    numbers = random.Random(seed)
    return torch.tensor([numbers.gauss(0, scale) for _ in range(count)], dtype=torch.float64)


OLD = -noise(1).abs()
NOW = OLD + noise(2, 0.4)
REF = OLD + noise(3, 0.3)
REWARDS = noise(4, count=B).float().double()
ADVANTAGES = noise(5, count=B)


def padded(flat: torch.Tensor) -> torch.Tensor:
    """[N] -> [B, T], with `JUNK` behind each row's end; differentiable."""
    return torch.full((B, T), JUNK, dtype=flat.dtype).masked_scatter(MASK.bool(), flat)


def flat(rows: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [N]."""
    return rows[MASK.bool()]


def per_token(rollouts: torch.Tensor) -> torch.Tensor:
    """[B] -> [B, T]."""
    return rollouts[:, None].expand(B, T)


def gradient_of(
    loss: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor = NOW
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scalar `loss` of logprobs [N], and its gradient [N]."""
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def ours(
    surrogate: str,
    aggregation: str,
    *,
    weight: torch.Tensor | float = 1.0,
    old: torch.Tensor = OLD,
    **options: Any,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Our step's loss as a function of logprobs [N]; `weight` is what the correction multiplies
    each token's cost by."""

    def loss(now: torch.Tensor) -> torch.Tensor:
        tokens = losses.Tokens(now, old, ADVANTAGES.repeat_interleave(LENGTHS), OFFSETS)
        costs, _ = find_function("losses", surrogate)(tokens, **options)
        return (find_function("losses", aggregation)(LENGTHS, MAX_TOKENS) * weight * costs).sum()

    return loss


def agree(found: Callable, expected: Callable, at: torch.Tensor = NOW) -> None:
    """Both losses have one value and one gradient, which is not nothing."""
    for mine, theirs in zip(gradient_of(found, at), gradient_of(expected, at), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)
    assert gradient_of(expected, at)[1].abs().max() > 1e-3


def differ(found: Callable, expected: Callable, at: torch.Tensor = NOW) -> None:
    """Their gradients are visibly apart."""
    assert (gradient_of(found, at)[1] - gradient_of(expected, at)[1]).abs().max() > 1e-3
