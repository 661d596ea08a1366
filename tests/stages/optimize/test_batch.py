"""Which rollouts of a batch are passed through the model, and which are learned by heart."""

import pytest
import torch

from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.ragged import Ragged
from quiver.stages.optimize import terms
from quiver.stages.optimize.batch import Batch
from quiver.stages.optimize.stage import Config


def batch_of(lengths: list[int], advantages: list[float], rewards: list[float]) -> Batch:
    """Rollouts of these lengths, of groups of their own."""
    ids = torch.arange(sum(lengths), dtype=torch.int32)
    completions = Ragged.from_lengths(ids, torch.tensor(lengths))
    numbers = list(range(len(lengths)))
    return Batch(
        sequences=Sequences(completions, completions, torch.ones(len(lengths))),
        groups=numbers,
        prompt_numbers=numbers,
        advantages=torch.tensor(advantages),
        old_logprobs=torch.full((len(ids),), -0.5),
        prox_logprobs=None,
        ref_logprobs=None,
        rewards=torch.tensor(rewards),
    )


def test_rollouts_whose_turns_cancel_are_passed_and_those_of_zeros_are_not():
    """Advantages of tokens: of the first rollout they add up to 0."""
    batch = batch_of([2, 2, 3, 1], [1.0, -1.0, 0.0, 0.0, 0.5, 0.5, -1.0, 2.0], [0.0] * 4)
    assert batch.active_rows(zero_is_idle=True) == [0, 2, 3]
    assert batch.active_rows(zero_is_idle=False) == [0, 1, 2, 3]


def test_what_is_learned_by_heart_has_the_least_reward_or_more():
    """0.3 over the three tokens of the rewards 0.5 and 2; not of −1, and not of the last rollout,
    which is no member of the step."""
    batch = batch_of([2, 1, 3, 2, 1], [0.0] * 5, [-1.0, 0.5, 0.49, 2.0, 9.0])
    found = terms.nll_weights(Config(nll_coef=0.3, nll_reward=0.5), batch, [0, 1, 2, 3])
    assert found.tolist() == pytest.approx([0, 0, 0.1, 0, 0, 0, 0.1, 0.1, 0])
    assert terms.nll_weights(Config(), batch, [0, 1, 2, 3]) is None
