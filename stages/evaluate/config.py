"""What an evaluation measures.

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from quiver.stages.common.config import Config as Base


class Config(Base):
    """What an evaluation measures."""

    score: str = "reward"
    """`reward`, or the name of one reward function: its part alone, before its weight."""
    k: tuple[int, ...] = (1,)
    """For each k: the unbiased estimate that one of k samples is correct. A prompt with fewer
    samples is left out of it."""
    threshold: float = 1.0
    """A sample is correct where its score is at least this."""
    unscored: Literal["worst", "zero", "leave_out"] = "zero"
    """What an answer counts as that a limit cut off (max_tokens, max_turns, …) and that no scorer
    gave a number for. `zero`: as 0. `worst`: as the lowest score here and in the baseline, at most
    0; for rewards that can be negative. `leave_out`: as nothing, which favours a policy that is cut
    more often; for a part that does not apply to every prompt. Rows whose scorer or environment
    failed are left out in any case."""

    @field_validator("k")
    @classmethod
    def _positive(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(ks)) < len(ks) or any(k < 1 for k in ks):
            raise ValueError("each k is at least 1 and stands once")
        return ks

    @model_validator(mode="after")
    def _cut_off_is_not_correct(self) -> Config:
        if self.unscored == "zero" and self.threshold <= 0:
            raise ValueError(
                f"threshold is {self.threshold:g}, so an answer that a limit cut off would be "
                'correct with its 0: set unscored = "worst" or "leave_out", or raise threshold'
            )
        return self
