"""The fields of `[evaluate]`.

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from quiver.stages.core.config import Config as Base


class Config(Base):
    """The scores and estimates of an evaluation."""

    score: str = "reward"
    """`reward`, or the name of one reward function: only its part, before its weight."""
    k: tuple[int, ...] = (1,)
    """For each k: the unbiased estimate that at least one of k samples is correct. Prompts with
    fewer samples are left out."""
    threshold: float = 1.0
    """Smallest score of a correct sample."""
    unscored: Literal["worst", "zero", "leave_out"] = "zero"
    """Score of an answer that a limit cut off (max_tokens, max_turns, …) and that no scorer gave a
    number. `zero`: 0. `worst`: the lowest score here and in the baseline, at most 0; for rewards
    that can be negative. `leave_out`: none, which favours a policy that is cut more often; for a
    part that does not apply to every prompt. Rows whose scorer or environment failed are always
    left out."""

    @field_validator("k")
    @classmethod
    def _positive(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(ks)) < len(ks) or any(k < 1 for k in ks):
            raise ValueError("each k must be at least 1 and occur once")
        return ks

    @model_validator(mode="after")
    def _cut_off_is_not_correct(self) -> Config:
        if self.unscored == "zero" and self.threshold <= 0:
            raise ValueError(
                f"threshold is {self.threshold:g}, so an answer that a limit cut off would "
                'count as correct with its 0: set unscored = "worst" or "leave_out", or raise '
                "threshold"
            )
        return self
