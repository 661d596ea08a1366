"""NLL term: the negative log-likelihood of rollouts with high reward, added to the policy's loss.

loss = policy_loss − Σ_t weights(config, batch, members)_t · logprobs_t
"""

from __future__ import annotations

import torch
from torch import Tensor

from .batch import Batch
from .config import Config


def weights(config: Config, batch: Batch, members: list[int]) -> Tensor | None:
    """nll_coef / M for each of the M tokens of the step's rollouts whose reward is at least
    `nll_reward`; 0 elsewhere. None without `nll_coef`.

    The mean is over these tokens in the whole optimizer step, with any aggregation of the policy's
    loss. Rollouts that are masked have no loss here either.

    Args:
        batch: with rewards [K].
        members: rollouts of the step.
    Returns:
        [N] float64.

    Reference: VAPO, https://arxiv.org/abs/2504.05118 (positive-example LM loss), whose positive
    examples are the correct answers.
    """
    if not config.nll_coef:
        return None
    good = [row for row in members if batch.rewards[row] >= config.nll_reward]
    _, positions = batch.counted_tokens(good)
    of_tokens = torch.zeros(len(batch.old_logprobs), dtype=torch.float64)
    of_tokens[positions] = config.nll_coef / max(len(positions), 1)
    return of_tokens
