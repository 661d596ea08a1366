"""The fields of `[evaluate]`.

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator, model_validator

from quiver.stages.core.config import Config as Base

IS_THE_SUM = (
    'evaluate.score = "reward" is the whole reward, not the part named reward: give that scorer '
    "another name to tell them apart"
)
"""Warning about a part that has the name of the sum, and other numbers."""


class Config(Base):
    """The scores and estimates of an evaluation."""

    score: str = "reward"
    """`reward`, the weighted sum of all parts, or the name of one reward function: only its part,
    before its weight. `reward` is the sum even if a part has that name."""
    k: tuple[int, ...] = (1,)
    """For each k: the unbiased estimate that at least one of k samples is correct. Prompts with
    fewer samples are left out."""
    threshold: float = 1.0
    """A sample with at least this score is correct. `k` and the turns to success of episodes count
    correct samples; the mean score does not. The default, 1, fits a `score` of 0 for wrong and 1
    for right. Lower it for a score that rarely reaches 1, such as a sum with weights below 1."""
    unscored: Literal["worst", "zero", "leave_out"] = "zero"
    """Score of an answer that a limit (max_tokens, max_turns, …) cut off, if no scorer gave it a
    number. `zero`: it counts as 0. `worst`: it counts as the lowest score here and in the baseline,
    at most 0 and below `threshold`; choose this if rewards can be negative, since 0 would then be a
    good score. `leave_out`: it does not count; choose this if `score` is a part that does not apply
    to every prompt, and note that it favours a policy that is cut off more often. Rows whose scorer
    or environment failed never count."""

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
