"""The quantity that an optimizer step minimises: a micro-batch's weighted loss, and the step's
numbers.

The weights of the tokens are computed for the whole step, so the sums over its micro-batches, on
any ranks, are the step's. Only an algorithm and a config are known here: no models, ranks or store.
The config's options override the algorithm's defaults.

Legend: B rollouts with N completion tokens are learned from; a micro-batch has b of them, with n
tokens. Of the B rollouts

    members    belong to the step
    masked     were cut off and have no loss, but count in the denominators, as rollouts without
               tokens (`mask_counted`)
    idle       have advantage 0, and nothing else of the loss trains them (`zero_is_idle`): they are
               not passed through the model, and count in the denominators
    active     all others: passed through the model

Dropped rollouts, such as those without a reward, are not among the B: rollouts.py, which joins them
with their rewards, lists the reasons.

    objective = Objective(config, find_algorithm("grpo"))
    columns = batch.token_columns(layout.rows)
    whole_step = StepColumns(objective.weights(batch, members))
    step_columns = whole_step.at(batch.places(layout.rows))
    loss, sums, log_ratio_max = objective.loss(columns, policy(layout), step_columns)
    objective.numbers(sums, places, warming=False, step_columns=whole_step)
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor

from quiver.schemas.errors import ConfigError

from . import critic, losses, offpolicy
from .algorithms import Algorithm, find_function
from .batch import Batch, StepColumns, TokenColumns
from .config import Config

NUM_SUMS = 11
"""Three losses, the weighted entropy, three sums over tokens, and four sums of the critic's."""


class Objective:
    """The loss of an algorithm with the options of a config. Raises ConfigError if its surrogate
    does not take them."""

    def __init__(self, config: Config, algorithm: Algorithm) -> None:
        self.config = config
        self.has_critic = algorithm.has_critic
        self.kl_in_loss = config.kl_in_loss
        self.has_entropy_bonus = config.has_entropy_bonus
        self.surrogate = find_function("losses", algorithm.surrogate)
        self.aggregate = find_function("losses", config.aggregation or algorithm.aggregation)
        self.weighs_groups = "groups" in inspect.signature(self.aggregate).parameters
        self.options = {**algorithm.defaults, **config.surrogate_options()}
        self.options.pop("drop_zero_variance", None)
        self.zero_is_idle = not (
            algorithm.advantage_of == "tokens"
            or not algorithm.zero_is_idle
            or config.terms_beside_rewards()
            or config.kl_target
            or self.options.get("drift_coef")
            or config.entropy_share < 1
        )
        """True if rollouts with advantage 0 need no pass, since none of their tokens has a
        gradient."""
        try:
            inspect.signature(self.surrogate).bind(None, **self.options)
        except TypeError as error:
            raise ConfigError(
                f"optimize.algorithm {algorithm.name}",
                f"its surrogate does not take these options: {error}",
                next="correct optimize.options",
            ) from None

    def weights(self, batch: Batch, members: list[int]) -> Tensor:
        """Return [N] float64: the weight of each token in the step of rollouts `members`; 0 for the
        tokens of other rollouts."""
        lengths, places = batch.counted_tokens(members)
        weights = torch.zeros(len(batch.old_logprobs), dtype=torch.float64)
        groups = torch.tensor(batch.groups, dtype=torch.int64)[members]
        options = {"groups": groups} if self.weighs_groups else {}
        weights[places] = self.aggregate(lengths, batch.max_completion_tokens, **options)
        return weights

    def loss(
        self, columns: TokenColumns, outputs: tuple[Tensor, ...], step_columns: StepColumns
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weighted loss of a micro-batch. Nothing is read back from the device.

        It is Σ weight · (w · token loss + kl_coef · KL + value_coef · value loss − entropy_coef ·
        entropy) − Σ nll_weight · logprob over the n tokens. w is 1 without proximal logprobs, else
        the factor of offpolicy.py: `losses.correction`, or 0 for a rejected token. With
        `entropy_share`, w is 0 for all tokens but those of highest entropy. The last term is a mean
        of its own, over the tokens of the step's good answers (terms.py).

        Args:
            columns: the batch's columns for its n tokens.
            outputs: `Outputs` of the policy for these tokens.
            step_columns: the step's columns for these tokens.
        Returns:
            The loss, its share of the step's sums ([NUM_SUMS] float64, for `numbers`), and the
            logarithm of the largest ratio of the policy's probability to the engine's.
        """
        config = self.config
        logprobs, entropy, values = outputs
        weights = step_columns.weights.float()
        tokens = losses.Tokens(logprobs, columns.anchor, columns.advantages, columns.offsets)
        token_losses, at_bound = self.surrogate(tokens, **self.options)
        if columns.prox_logprobs is not None:
            token_losses = token_losses * offpolicy.weight(
                columns.anchor, columns.old_logprobs, columns.offsets, config.correction
            )
        if step_columns.learns is not None:
            token_losses = token_losses * step_columns.learns
        policy_loss = (weights * token_losses).sum()
        if step_columns.nll_weights is not None:
            policy_loss = policy_loss - (step_columns.nll_weights.float() * logprobs).sum()
        weighted_entropy = (weights * entropy).sum()
        zero = torch.zeros((), device=logprobs.device)
        kl_loss = value_loss = zero
        critic_sums = [zero] * 4
        if columns.ref_logprobs is not None:  # reported even if `kl_coef` is 0
            kl = losses.kl(logprobs, columns.ref_logprobs, config.kl_estimator, config.kl_unbiased)
            kl_loss = (weights * kl).sum()
        if self.has_critic:
            value_losses = losses.value_loss(
                values, columns.old_values, columns.returns, config.value_clip
            )
            value_loss = (weights * value_losses).sum()
            critic_sums = critic.value_sums(values, columns.returns)
        loss = policy_loss + step_columns.kl_coef * kl_loss + config.value_coef * value_loss
        entropy_coef = step_columns.entropy_coef
        loss = loss - entropy_coef * weighted_entropy if entropy_coef else loss
        with torch.no_grad():
            log_ratio = losses.log_ratio(logprobs, columns.old_logprobs)
            approx_kl = torch.expm1(log_ratio) - log_ratio
            sums = [policy_loss, kl_loss, value_loss, weighted_entropy]
            sums += [at_bound.sum(), approx_kl.sum(), entropy.sum(), *critic_sums]
        return loss, torch.stack([term.double() for term in sums]), log_ratio.max()

    def numbers(
        self, sums: Tensor, places: Tensor, warming: bool, step_columns: StepColumns
    ) -> dict[str, float | None]:
        """Return losses and means of a step, from the sums over its micro-batches.

        `kl`, `clip_fraction`, `approx_kl` and `entropy` are means over the tokens at `places`,
        those that were passed through the model, without idle rollouts; `kl` by the tokens'
        weights. `warming`: only the critic learns.
        """
        num_tokens = len(places)
        policy_loss, kl_loss, value_loss, weighted_entropy, *totals = sums.tolist()
        clip_fraction, approx_kl, entropy, *critic_means = (total / num_tokens for total in totals)
        kl_coef = step_columns.kl_coef
        entropy_coef = step_columns.entropy_coef
        loss = policy_loss + kl_coef * kl_loss - entropy_coef * weighted_entropy
        critic_numbers = {"value_loss": None}
        if self.has_critic:
            value_term = self.config.value_coef * value_loss
            loss = value_term if warming else loss + value_term
            explained_variance = critic.explained_variance(*critic_means)
            critic_numbers = {"value_loss": value_loss, "explained_variance": explained_variance}
        return {
            "loss": loss,
            "policy_loss": policy_loss,
            "kl_loss": kl_loss,
            "kl": kl_loss / float(step_columns.weights[places].sum()),
            "clip_fraction": clip_fraction,
            "approx_kl": approx_kl,
            "entropy": entropy,
            **critic_numbers,
        }
