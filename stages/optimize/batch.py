"""Columns of the rollouts that are learned from, and of one optimizer step.

Not of the spine: it is a list of columns, for looking up their shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.ragged import Ragged


class TokenColumns(NamedTuple):
    """Columns [n] of the n tokens of some rollouts, taken from `Batch`."""

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


class Origin(NamedTuple):
    """How a rollout was sampled."""

    is_stale: bool
    """By a policy older than the starting checkpoint, so that the logprobs differ legitimately and
    the audit only reports them."""
    biases: str
    """Settings that made the sampled distribution differ from the policy's (`top_p = 0.9`)."""
    quantization: str
    """How the engine rounded its weights or cache (`quantization = fp8`)."""


@dataclass(frozen=True)
class Batch:
    """The B rollouts that take part, with N completion tokens."""

    sequences: Sequences
    groups: list[int]
    """[B] rollouts of one prompt have one number."""
    prompt_numbers: list[int]
    """[B] rollouts with the same number have the same prompt ids, so they can share them."""
    advantages: Tensor
    """[B] float32; [N] for advantages of turns or tokens. Those of tokens are NaN until `prepare`
    has computed them."""
    old_logprobs: Tensor
    """[N] float32"""
    prox_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    masked: Tensor
    """[B] bool: counts in the denominators as a rollout, but has no loss."""
    origins: Sequence[Origin] = ()
    """[B] how each rollout was sampled. The audit reads them."""
    max_completion_tokens: int | None = None
    """Token limit of generation, for aggregation `constant`."""
    rewards: Tensor | None = None
    """[B] float32, for a critic and other per-token advantages, and for the NLL term."""
    turn_rewards: Ragged | None = None
    """[B rows] float32: one for each turn, if credit is per turn."""
    reward_scale: float = 1.0
    """Factor of the critic's rewards; see terms.py."""
    cut: Tensor | None = None
    """[B] bool: ended by `length`, for a critic."""
    old_values: Tensor | None = None
    """[N] float32, once a critic has computed them."""
    returns: Tensor | None = None
    """[N] float32, once a critic has computed them."""

    @property
    def has_stale(self) -> bool:
        """True if an older policy sampled some of them."""
        return any(origin.is_stale for origin in self.origins)

    @property
    def has_token_advantages(self) -> bool:
        """True if each token has its own advantage."""
        return len(self.advantages) == len(self.old_logprobs)

    @cached_property
    def token_advantages(self) -> Tensor:
        """[N] advantage of the token, or of its rollout."""
        if self.has_token_advantages:
            return self.advantages
        return self.advantages.repeat_interleave(self.sequences.completions.lengths)

    def active_rows(self, zero_is_idle: bool) -> list[int]:
        """Return the rollouts that are passed through the model: those with a loss and, if
        `zero_is_idle`, with an advantage other than 0."""
        is_active = torch.ones(len(self.groups), dtype=torch.bool)
        if zero_is_idle:
            is_active = self.advantages != 0
            if self.has_token_advantages:
                counts = self.sequences.completions.with_values(is_active.long()).segment_sum()
                is_active = counts > 0
        return (is_active & ~self.masked).nonzero()[:, 0].tolist()

    def counted_tokens(self, members: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return how many tokens of each of the rollouts `members` have a weight [b], 0 for masked
        ones; and the places [n] of these tokens among the N."""
        rows = torch.as_tensor(members, dtype=torch.int64)
        lengths = self.sequences.completions.lengths[rows]
        is_masked = self.masked[rows]
        return lengths.masked_fill(is_masked, 0), self.places(rows[~is_masked])

    def places(self, rows: Sequence[int] | np.ndarray | Tensor) -> Tensor:
        """Return the places [n] int64 of the completion tokens of rollouts `rows` among the
        N."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        return self.sequences.completions.places(rows)

    def token_columns(self, rows: Sequence[int] | np.ndarray) -> TokenColumns:
        """Return the tokens of rollouts `rows` [b]."""
        rows = torch.as_tensor(rows, dtype=torch.int64)
        places = self.places(rows)
        columns = (
            self.old_logprobs,
            self.prox_logprobs,
            self.token_advantages,
            self.ref_logprobs,
            self.old_values,
            self.returns,
        )
        lengths = self.sequences.completions.lengths[rows]
        offsets = Ragged.from_lengths(places, lengths).offsets
        taken = [None if column is None else column[places] for column in columns]
        return TokenColumns(offsets, *taken)


@dataclass(frozen=True)
class StepColumns:
    """Per-token columns of one optimizer step."""

    weights: Tensor
    """[N] float64"""
    learns: Tensor | None = None
    """[N] bool: the policy learns from the token. None: from all tokens."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    kl_coef: float = 0.0
    """Coefficient of the KL to the reference in the loss."""
    nll_weights: Tensor | None = None
    """[N] float64, for the negative log-likelihood of good answers."""

    def at(self, places: Tensor) -> StepColumns:
        """Return the step's columns for the tokens at `places` [n]."""
        columns = {
            name: column[places]
            for name, column in vars(self).items()
            if isinstance(column, Tensor)
        }
        return replace(self, **columns)
