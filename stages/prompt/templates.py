"""How rows become token ids: the part of the prompt stage's config that a recipe has in
[prompt]."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime


class TemplateConfig(Base):
    """How rows become token ids, and how long a prompt may be."""

    system: str | None = None
    """System message put before chats that do not begin with one of their own."""
    template: str | None = None
    """File with a jinja chat template. None: the policy's own."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt. The model's context less `reserve_tokens` holds besides."""
    reserve_tokens: int = Field(default=0, ge=0)
    """Room for the completion: prompt and this many tokens must fit the model's context (an
    encoder's: the prompt alone)."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt that is too long: stop, or leave it out, counted and listed in the
    manifest."""
    template_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Longest time that the template may take for one prompt."""
