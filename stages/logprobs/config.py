"""Config of logprobs: the model, and how its forward pass runs.

Not of the spine: look up fields by name.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quiver.stages.core.config import Config as Base
from quiver.stages.core.config import Runtime


class PassConfig(Base):
    """Settings of the forward pass over the saved completions."""

    precision: Literal["auto", "fp32", "bf16", "bf16_pure"] = "auto"
    """Precision of the pass, with optimize's names. auto: bf16 on a GPU, fp32 on a CPU. bf16:
    autocast, weights in float32. bf16_pure: weights in bfloat16 too, like the pass of
    bf16_stochastic."""
    packing: Runtime[Literal["shared", "packed", "single"]] = "shared"
    """Densest packing of rows to use; a simpler one is chosen if the model needs it."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens per micro-batch. Default: 8192 to 65536 on a GPU, by its memory; 2048 on a CPU."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device of the pass."""
    other_special_tokens: Runtime[bool] = False
    """Accept a policy whose special tokens have other ids than the sampling policy's, such as a
    base model that knows no chat. All other tokens must always be the same."""


class Config(PassConfig):
    """Config of the logprobs stage."""

    role: Literal["ref", "prox"] = "ref"
    """`ref`: logprobs under the KL term's reference policy. `prox`: the ratio's denominator,
    computed with the trainer's numerics."""
    prox_of: Literal["behaviour", "start"] = "behaviour"
    """For `prox`: the policy that sampled, or the one that a training starts from. The stage
    optimize refuses logprobs of another policy than its own `prox_of` names."""

    @property
    def is_of_sampler(self) -> bool:
        """True if only the policy that sampled may compute them."""
        return self.role == "prox" and self.prox_of == "behaviour"
