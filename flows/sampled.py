"""What an iteration learns from: the references of a round of sampling, and of its further rounds.

sampled.rollouts                                    # arith/rollouts@4, of the first round
[each.rollouts for each in sampled.rounds]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampled:
    """What one iteration learns from, by one policy."""

    iteration: int
    """Counted from 1."""
    round: int
    """Counted from 1 over the whole run: which rows and seeds it has. Without [data] refill each
    iteration has one, of its own number."""
    prompts: str
    """Reference, as those below."""
    rollouts: str
    rewards: str
    prox_logprobs: str | None
    """With the trainer's numerics, for the ratio's denominator (see `proximal`). None: nothing asks
    for them, or not yet."""
    reward_mean: float | None
    seconds: dict[str, float]
    """By stage."""
    contrast_groups: int | None
    """How many groups of this round have different rewards. None: without [data] refill."""
    more: tuple[Sampled, ...]
    """The further rounds of the iteration. Of them `reward_mean` and `seconds` tell too."""

    @property
    def rounds(self) -> tuple[Sampled, ...]:
        """All of the iteration; mostly one."""
        return self, *self.more
