"""What an evaluation measures.

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

from pydantic import field_validator

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

    @field_validator("k")
    @classmethod
    def _positive(cls, ks: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(ks)) < len(ks) or any(k < 1 for k in ks):
            raise ValueError("each k is at least 1 and stands once")
        return ks
