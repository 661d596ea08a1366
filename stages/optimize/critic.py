"""What a critic adds to the loop: the value of every state before the first update, and from it
each token's advantage.

Values are taken once, before any weight changes, and stay what they are for all epochs and
mini-batches. Only completion tokens are steps. Whether the state after the last token is worth
anything is told by the finish reason, never by the last id: after `stop` nothing follows; after
`length` the value of the cut state counts only where `bootstrap_length` asks for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.ragged import Ragged

from . import advantages
from .losses import log_ratio

if TYPE_CHECKING:
    from .objective import Batch
    from .stage import Config


def with_next_state(data: Sequences, cut: torch.Tensor) -> tuple[Sequences, torch.Tensor]:
    """One more id after each rollout of `cut` [K] bool, so that a pass also gives the value after
    its last token.

    Returns the longer rollouts, and [N'] bool: which of their tokens are the rollouts' own. The id
    is 0; nobody reads it.
    """
    completions = data.completions
    lengths = completions.lengths + cut
    own = torch.ones(int(lengths.sum()), dtype=torch.bool)
    own[(lengths.cumsum(0) - 1)[cut]] = False
    values = torch.zeros(len(own), dtype=completions.values.dtype)
    values[own] = completions.values
    return dataclasses.replace(data, completions=Ragged.from_lengths(values, lengths)), own


def token_rewards(config: Config, batch: Batch) -> torch.Tensor:
    """[N] r_t: the rollout's reward on its last token, and with `kl_in_reward` −kl_coef · (old −
    ref) on every token."""
    offsets = batch.data.completions.offsets
    rewards = torch.zeros(len(batch.old), dtype=torch.float64)
    if config.kl_in_reward:
        rewards -= config.kl_coef * log_ratio(batch.old, batch.ref).double()
    return rewards.index_add(0, offsets[1:] - 1, batch.rewards.double())


def judged(
    config: Config,
    advantage: Callable[..., Any],
    batch: Batch,
    values: torch.Tensor,
    last_values: torch.Tensor | None,
) -> Batch:
    """The batch with its old values [N], returns [N] and whitened advantages [N]. `last_values`
    [K]: of the cut states."""
    offsets = batch.data.completions.offsets
    options = {"gamma": config.gamma, "gae_lambda": config.gae_lambda, "last_values": last_values}
    found, returns = advantage(token_rewards(config, batch), values, offsets, **options)
    return dataclasses.replace(
        batch, advantages=advantages.whitened(found), old_values=values, returns=returns
    )


def moments(values: torch.Tensor, returns: torch.Tensor) -> list[torch.Tensor]:
    """Sums over tokens of R, R², R − V and (R − V)², in float64: micro-batches and ranks add up."""
    returns = returns.double()
    errors = returns - values.detach().double()
    return [returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]


def explained_variance(
    returns: float, squares: float, errors: float, error_squares: float
) -> float:
    """1 − Var(R − V) / Var(R), from the means of what `moments` sums; NaN where all returns are
    equal."""
    variance = squares - returns**2
    if not variance > 1e-12 * max(squares, 1e-12):
        return math.nan
    return 1.0 - (error_squares - errors**2) / variance
