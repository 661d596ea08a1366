"""What an optimizer step minimises: the weighted loss of a micro-batch, and the step's numbers from
the sums over all of them.

The weights of the tokens are made for the whole step, so the sums of its micro-batches, on whatever
ranks, are the step's. An algorithm with the config's options in place of its own is all that is
known here: nothing of models, ranks, or the store.

    objective = Objective(config, resolve("grpo"))
    weights = objective.weights(batch, members)[batch.data.completions.positions(layout.rows)]
    loss, sums, ratio_max = objective.loss(batch, policy(layout), layout.rows, weights)
    objective.numbers(sums, tokens, warming=False)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.ragged import Ragged

from . import critic, losses
from .algorithms import Algorithm, part

if TYPE_CHECKING:
    from .stage import Config

_LOSSES = ("policy_loss", "kl_loss", "value_loss")
_MEANS = ("clip_fraction", "approx_kl", "entropy")
_MOMENTS = ("returns", "squares", "errors", "error_squares")
NUM_SUMS = len((*_LOSSES, *_MEANS, *_MOMENTS))


@dataclass(frozen=True)
class Batch:
    """The K rollouts that take part, N completion tokens."""

    data: Sequences
    groups: list[int]
    """[K] rollouts of one prompt bear one number."""
    prompts: list[int]
    """[K] rollouts with the same number have the same prompt ids, so they can share them."""
    advantages: torch.Tensor
    """[K] float32; with a critic [N], NaN until it has judged"""
    old: torch.Tensor
    """[N] float32"""
    prox: torch.Tensor | None
    ref: torch.Tensor | None
    stale: torch.Tensor | None = None
    """[K] bool: sampled by an older policy than the starting checkpoint, so that their logprobs
    differ by right and the audit only reports them. None: no rollout."""
    rewards: torch.Tensor | None = None
    """[K] float32, for a critic"""
    cut: torch.Tensor | None = None
    """[K] bool: ended by `length`, for a critic"""
    old_values: torch.Tensor | None = None
    """[N] float32, once a critic has judged"""
    returns: torch.Tensor | None = None
    """[N] float32, likewise"""

    @property
    def anchor(self) -> torch.Tensor:
        """[N] the ratio's denominator."""
        return self.old if self.prox is None else self.prox


class Objective:
    """The loss of an algorithm, with the options of a config. ConfigError when its surrogate does
    not take them."""

    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        self.config, self.critic = config, algorithm.critic
        self.options = {**algorithm.defaults, **config.surrogate_options()}
        self.options.pop("drop_zero_variance", None)
        self.surrogate: Callable[..., Any] = part("losses", algorithm.surrogate)
        _check_options(self.surrogate, self.options, algorithm.name)
        self.aggregate: Callable[..., Any] = part(
            "losses", config.aggregation or algorithm.aggregation
        )
        self.kl_coef = 0.0 if config.kl_in_reward else config.kl_coef

    def weights(self, batch: Batch, members: list[int]) -> torch.Tensor:
        """[N] float64: what each token weighs in the step that rollouts `members` make up; 0 for
        the others'."""
        completions, chosen = batch.data.completions, torch.tensor(members)
        weights = torch.zeros(len(batch.old), dtype=torch.float64)
        weights[completions.positions(chosen)] = self.aggregate(
            completions.lengths[chosen], self.config.max_completion_tokens
        )
        return weights

    def loss(
        self,
        batch: Batch,
        found: tuple[torch.Tensor, ...],
        rows: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Weighted loss of the rollouts `rows` [b]. Of their n tokens the policy `found` logprobs,
        entropy and values; `weights` are theirs; each [n].

        Returns the loss, its share of the step's sums ([NUM_SUMS] float64, for `numbers`), and the
        largest ratio.
        """
        logprobs, entropy, values = found
        device, places = logprobs.device, batch.data.completions.positions(rows)
        old, anchor = batch.old[places].to(device), batch.anchor[places].to(device)
        lengths = batch.data.completions.lengths[rows]
        offsets = Ragged.from_lengths(old, lengths.to(device)).offsets
        advantages = (
            batch.advantages[places]
            if self.critic
            else batch.advantages[rows].repeat_interleave(lengths)
        )
        weights = weights.to(device, torch.float32)
        costs, clipped = self.surrogate(
            losses.Tokens(logprobs, anchor, advantages.to(device), offsets), **self.options
        )
        if batch.prox is not None:
            costs = costs * losses.correction(
                anchor, old, offsets, **self.config.correction.model_dump()
            )
        policy_loss = loss = (weights * costs).sum()
        kl_loss = value_loss = torch.zeros((), device=device)
        if batch.ref is not None:
            kl = losses.kl(
                logprobs,
                batch.ref[places].to(device),
                self.config.kl_estimator,
                self.config.kl_unbiased,
            )
            kl_loss = (weights * kl).sum()
            loss = policy_loss + self.kl_coef * kl_loss
        moments = [kl_loss.new_zeros(())] * len(_MOMENTS)
        if self.critic:
            old_values, returns = (
                column[places].to(device) for column in (batch.old_values, batch.returns)
            )
            value_loss = (
                weights * losses.value_loss(values, old_values, returns, self.config.value_clip)
            ).sum()
            loss = loss + self.config.value_coef * value_loss
            moments = critic.moments(values, returns)
        with torch.no_grad():
            ratio = losses.log_ratio(logprobs, old)
            parts = [policy_loss, kl_loss, value_loss]
            parts += [clipped.sum(), (torch.expm1(ratio) - ratio).sum(), entropy.sum(), *moments]
            return (
                loss,
                torch.stack([part.double() for part in parts]).cpu(),
                float(ratio.max().exp()),
            )

    def numbers(self, sums: torch.Tensor, tokens: int, warming: bool) -> dict[str, float | None]:
        """Losses and means of a step over `tokens` tokens, of the sums over its micro-batches.
        `warming`: the critic learns alone."""
        each = dict(zip((*_LOSSES, *_MEANS, *_MOMENTS), sums.tolist(), strict=True))
        for name in (*_MEANS, *_MOMENTS):
            each[name] /= tokens
        loss = each["policy_loss"] + self.kl_coef * each["kl_loss"]
        moments = [each.pop(name) for name in _MOMENTS]
        if self.critic:
            loss = (0.0 if warming else loss) + self.config.value_coef * each["value_loss"]
            each["explained_variance"] = critic.explained_variance(*moments)
        else:
            each["value_loss"] = None
        return {"loss": loss, **each}


def _check_options(surrogate: Callable[..., Any], options: Mapping[str, Any], name: str) -> None:
    try:
        inspect.signature(surrogate).bind(None, **options)
    except TypeError as error:
        raise ConfigError(
            f"optimize.algorithm {name}",
            f"its surrogate does not take these options: {error}",
            next="correct optimize.options",
        ) from None
