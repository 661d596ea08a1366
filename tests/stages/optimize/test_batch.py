"""Which rollouts of a batch are passed through the model."""

import torch

from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize.batch import Batch, Origin


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
        masked=torch.zeros(len(lengths), dtype=torch.bool),
        origins=[Origin(is_stale=False, biases="", quantization="")] * len(lengths),
        rewards=torch.tensor(rewards),
    )


def test_rollouts_whose_turns_cancel_are_passed_and_those_of_zeros_are_not():
    """Advantages of tokens: of the first rollout they add up to 0."""
    batch = batch_of([2, 2, 3, 1], [1.0, -1.0, 0.0, 0.0, 0.5, 0.5, -1.0, 2.0], [0.0] * 4)
    assert batch.active_rows(zero_is_idle=True) == [0, 2, 3]
    assert batch.active_rows(zero_is_idle=False) == [0, 1, 2, 3]
