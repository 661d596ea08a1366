"""The rollouts that are learned from, as columns of tensors; and the columns of one optimizer step.

Not of the spine: it is a list of columns, for looking up their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.ragged import Ragged


class Part(NamedTuple):
    """Columns [n] of the n tokens of some rollouts, as those of `Batch`, on one device."""

    offsets: Tensor
    """[b+1] int64"""
    old_logprobs: Tensor
    prox_logprobs: Tensor | None
    advantages: Tensor
    ref_logprobs: Tensor | None
    old_values: Tensor | None
    returns: Tensor | None

    @property
    def anchor(self) -> Tensor:
        """The ratio's denominator."""
        return self.old_logprobs if self.prox_logprobs is None else self.prox_logprobs


@dataclass(frozen=True)
class Batch:
    """The K rollouts that take part, N completion tokens."""

    sequences: Sequences
    groups: list[int]
    """[K] rollouts of one prompt bear one number."""
    prompt_numbers: list[int]
    """[K] rollouts with the same number have the same prompt ids, so they can share them."""
    advantages: Tensor
    """[K] float32; of turns [N]; with a critic [N], NaN until it has given the values"""
    old_logprobs: Tensor
    """[N] float32"""
    prox_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    stale: Tensor | None = None
    """[K] bool: sampled by an older policy than the starting checkpoint, so that their logprobs
    differ by right and the audit only reports them. None: none of them is."""
    biases: list[str] | None = None
    """[K] what made the sampled distribution another than the policy's (`top_p = 0.9`), empty where
    nothing did. None: nowhere."""
    masked: Tensor | None = None
    """[K] bool: counts in the denominators as a rollout, and has no loss. None: none of them."""
    max_completion_tokens: int | None = None
    """What generation allowed, for aggregation `constant`."""
    rewards: Tensor | None = None
    """[K] float32, for a critic"""
    turn_rewards: Ragged | None = None
    """[K rows] float32: one for each turn, where a critic is told them apart."""
    reward_scale: float = 1.0
    """What a critic's rewards are multiplied with; see reward_scaling.py."""
    cut: Tensor | None = None
    """[K] bool: ended by `length`, for a critic"""
    old_values: Tensor | None = None
    """[N] float32, once a critic has given them"""
    returns: Tensor | None = None
    """[N] float32, likewise"""

    @property
    def anchor(self) -> Tensor:
        """[N] the ratio's denominator."""
        return self.old_logprobs if self.prox_logprobs is None else self.prox_logprobs

    @property
    def has_stale(self) -> bool:
        """Whether an older policy sampled some of them."""
        return self.stale is not None and bool(self.stale.any())

    @property
    def has_token_advantages(self) -> bool:
        """Whether advantages are of tokens."""
        return len(self.advantages) == len(self.old_logprobs)

    @cached_property
    def token_advantages(self) -> Tensor:
        """[N] of a token, or its rollout's."""
        if self.has_token_advantages:
            return self.advantages
        return self.advantages.repeat_interleave(self.sequences.completions.lengths)

    def active_rows(self, zero_is_idle: bool) -> list[int]:
        """The rollouts that are passed through the model: those with a loss, and of these, where
        `zero_is_idle`, those whose advantage is not 0."""
        is_active = torch.ones(len(self.groups), dtype=torch.bool)
        if zero_is_idle:
            is_active = self.advantages != 0
            if self.has_token_advantages:
                counts = self.sequences.completions.with_values(is_active.long()).segment_sum()
                is_active = counts > 0
        if self.masked is not None:
            is_active = is_active & ~self.masked
        return is_active.nonzero()[:, 0].tolist()

    def counted_tokens(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[b] how many tokens of each of the rollouts `members` have a weight, none of those that
        are masked; and [n] where these tokens stand among the N."""
        rows = torch.as_tensor(members, dtype=torch.int64)
        lengths = self.sequences.completions.lengths[rows]
        if self.masked is None:
            return lengths, self.positions(rows)
        is_masked = self.masked[rows]
        return lengths.masked_fill(is_masked, 0), self.positions(rows[~is_masked])

    def positions(self, rows: Sequence[int] | Tensor) -> Tensor:
        """[n] int64: where the completion tokens of rollouts `rows` stand among the N."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        return self.sequences.completions.positions(rows)

    def part(self, rows: Sequence[int] | Tensor, device: torch.device) -> Part:
        """The tokens of rollouts `rows` [b] on `device`."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        positions = self.positions(rows)
        columns = (
            self.old_logprobs,
            self.prox_logprobs,
            self.token_advantages,
            self.ref_logprobs,
            self.old_values,
            self.returns,
        )
        lengths = self.sequences.completions.lengths[rows]
        offsets = Ragged.from_lengths(positions, lengths).offsets
        taken = [None if column is None else column[positions].to(device) for column in columns]
        return Part(offsets.to(device), *taken)


@dataclass(frozen=True)
class Step:
    """What tokens are in one optimizer step."""

    weights: Tensor
    """[N] float64"""
    learns: Tensor | None = None
    """[N] bool: the policy learns from it; None: from all of them"""
    entropy_coef: float = 0.0
    """Of the bonus."""
    kl_coef: float = 0.0
    """Of the KL to the reference in the loss."""
    nll_weights: Tensor | None = None
    """[N] float64, of the negative log-likelihood of good answers."""

    def at(self, positions: Tensor, device: torch.device) -> Step:
        """Of the tokens at `positions` [n] alone, on `device`."""
        columns = {
            name: column[positions].to(device)
            for name, column in vars(self).items()
            if isinstance(column, Tensor)
        }
        return replace(self, **columns)
