"""Advantages of tokens, from the reward to go or from one pass before the first update, such as a
critic's values.

The pass runs once, before any weight changes, and its columns stay fixed for all epochs and
mini-batches. Only completion tokens are steps. The finish reason, never the last id, decides if the
state after the last token has a value: after `stop` nothing follows; after `length` the value of
the cut state counts only if `bootstrap_length` is set.

Not of the spine: columns in, columns out, by the equations of advantages.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.ragged import Ragged

from . import advantages
from .algorithms import Algorithm, find_function
from .batch import Batch
from .config import Config
from .contract import TOKEN_OPTIONS
from .losses import log_ratio


def with_next_state(sequences: Sequences, cut: Tensor) -> tuple[Sequences, Tensor]:
    """Add one id after each rollout of `cut` [K] bool, so that a pass also gives the value after
    its last token.

    Returns the longer rollouts, and [N'] bool: which of their tokens were sampled. The added id is
    0 and is not used otherwise.
    """
    completions = sequences.completions
    lengths = completions.lengths + cut
    sampled = torch.ones(int(lengths.sum()), dtype=torch.bool)
    sampled[(lengths.cumsum(0) - 1)[cut]] = False
    ids = torch.zeros(len(sampled), dtype=completions.values.dtype)
    ids[sampled] = completions.values
    longer = dataclasses.replace(
        sequences,
        completions=Ragged.from_lengths(ids, lengths),
        turns=sequences.turns and sequences.turns.with_next_state(cut),
    )
    return longer, sampled


def token_rewards(config: Config, batch: Batch) -> Tensor:
    """Return r_t [N]: the rollout's reward, times `reward_scale`, on its last token, or its turns'
    rewards on the last token of each turn; with `kl_in_reward` also −kl_coef · (old − ref) on every
    token."""
    last_tokens = batch.sequences.completions.offsets[1:] - 1
    earned = batch.rewards
    if batch.turn_rewards is not None:
        last_tokens = batch.sequences.turns.last_tokens()
        earned = batch.turn_rewards.values
    rewards = torch.zeros(len(batch.old_logprobs), dtype=torch.float64)
    if config.kl_in_reward:
        rewards -= config.kl_coef * log_ratio(batch.old_logprobs, batch.ref_logprobs).double()
    return rewards.index_add(0, last_tokens, earned.double() * batch.reward_scale)


def with_token_advantages(
    config: Config, algorithm: Algorithm, batch: Batch, columns: Mapping[str, Tensor]
) -> Batch:
    """Return the batch with advantages [N] of its tokens; with a critic also old values [N] and
    returns [N].

    A masked rollout has advantage 0, and its tokens count in no baseline. `columns` come from a
    pass of the current policy; only the ones in `algorithm.columns` are used.

    Advantages of functions without `groups` are whitened. With `critic_lambda`, advantages and
    returns have different λ: the value then estimates nearly the whole reward to come, while
    advantages have less variance.

    Reference: VC-PPO, https://arxiv.org/abs/2503.01491 (decoupled GAE).
    """
    advantage = find_function("advantages", algorithm.advantage)
    rows = batch.active_rows(zero_is_idle=False)
    positions = batch.positions(rows)
    offered = {
        "groups": torch.tensor(batch.groups)[rows],
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
    }
    named = inspect.signature(advantage).parameters
    chosen = {name: offered[name] for name in TOKEN_OPTIONS if name in named}
    for name in algorithm.columns:
        chosen[name] = columns[name][rows if name == "last_values" else positions]
    lengths = batch.sequences.completions.lengths[rows]
    estimate = partial(
        advantage,
        token_rewards(config, batch)[positions],
        offsets=Ragged.from_lengths(positions, lengths).offsets,
    )
    token_advantages = estimate(**chosen)
    if algorithm.critic:
        token_advantages, returns = token_advantages
        if config.critic_lambda is not None:
            _, returns = estimate(**{**chosen, "gae_lambda": config.critic_lambda})
        of_all = torch.zeros(len(batch.old_logprobs))
        of_all[positions] = returns
        batch = dataclasses.replace(batch, old_values=columns["values"], returns=of_all)
    if "groups" not in named:
        token_advantages = advantages.whitened(token_advantages)
    of_all = torch.zeros(len(batch.old_logprobs))
    of_all[positions] = token_advantages
    return dataclasses.replace(batch, advantages=of_all)


def value_moments(values: Tensor, returns: Tensor) -> list[Tensor]:
    """Return Σ R, Σ R², Σ (R − V) and Σ (R − V)² over tokens, in float64, so that micro-batches and
    ranks add up.

    Args:
        values: [N] V_t.
        returns: [N] R_t, the target of V_t.
    Returns:
        Four sums, each [], without gradient; divided by N they are the arguments of
        `explained_variance`.
    """
    returns = returns.double()
    errors = returns - values.detach().double()
    return [returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()]


def explained_variance(
    mean_return: float, mean_square: float, mean_error: float, mean_square_error: float
) -> float:
    """1 − Var(R − V) / Var(R): 1 for a perfect critic, 0 for a constant one.

    Args:
        mean_return, mean_square, mean_error, mean_square_error: over tokens, of R, R², R − V and
            (R − V)².
    Returns:
        At most 1; NaN if all returns are equal.
    """
    variance = mean_square - mean_return**2
    if not variance > 1e-12 * max(mean_square, 1e-12):
        return math.nan
    return 1.0 - (mean_square_error - mean_error**2) / variance
