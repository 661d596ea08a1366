"""The config of logprobs: whose probability is asked for, and how the pass is made.

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime


class PassConfig(Base):
    """How the pass over the saved completions is made."""

    precision: Literal["auto", "fp32", "bf16", "bf16_pure"] = "auto"
    """Of the pass, as optimize has it. auto: bf16 on a GPU, fp32 on a CPU. bf16: autocast, weights
    in float32. bf16_pure: weights in bfloat16 too, the pass of bf16_stochastic."""
    packing: Runtime[Literal["shared", "packed", "single"]] = "shared"
    """Most that is packed together; a simpler way is taken when the model needs it."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens of one micro-batch. None: 8192 on a GPU, 2048 on a CPU."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where to score."""
    other_special_tokens: Runtime[bool] = False
    """Accept a policy to which special tokens have other ids than to the one that sampled, such as
    a base model that knows no chat. All other tokens must be the same in any case."""


class Config(PassConfig):
    """Whose probability is asked for, and how the pass is made."""

    role: Literal["ref", "prox"] = "ref"
    """`ref`: the reference, for the KL term. `prox`: the ratio's denominator, with the trainer's
    numerics."""
    prox_of: Literal["behaviour", "start"] = "behaviour"
    """Of `prox`: the policy that sampled, or the one that a training starts from. The stage
    optimize refuses those of another policy than its own `prox_of` says."""

    @property
    def is_of_sampler(self) -> bool:
        """Whether only the policy that sampled may score."""
        return self.role == "prox" and self.prox_of == "behaviour"
