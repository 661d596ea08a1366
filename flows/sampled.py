"""`Sampled`: the references of a sampling round, with the further rounds of its iteration.

sampled.rollouts                                    # arith/rollouts@4, of the first round
[each.rollouts for each in sampled.rounds]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampled:
    """A round of rollouts that one iteration learns from, sampled by one policy."""

    iteration: int
    """Number of the iteration, from 1."""
    round: int
    """Number of the round, counted from 1 over the whole run; it decides rows and seeds. Without
    [data] refill, each iteration has one round with the iteration's number."""
    prompts: str
    """Reference of the prompts; the fields below are references too."""
    rollouts: str
    rewards: str
    prox_logprobs: str | None
    """Logprobs with the trainer's numerics, for the ratio's denominator (see `proximal`). None: not
    needed, or not scored yet."""
    reward_mean: float | None
    seconds: dict[str, float]
    """Seconds by stage."""
    contrast_groups: int | None
    """Number of groups of this round with different rewards. None: without [data] refill."""
    more: tuple[Sampled, ...]
    """The further rounds of the iteration. `reward_mean` and `seconds` include them."""

    @property
    def rounds(self) -> tuple[Sampled, ...]:
        """All rounds of the iteration; usually one."""
        return self, *self.more
