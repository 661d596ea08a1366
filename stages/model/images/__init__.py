"""Pictures in prompts: checking, decoding, and conversion to a model's inputs."""

from __future__ import annotations

from typing import NamedTuple


class Picture(NamedTuple):
    """A picture in a prompt."""

    content: bytes
    """A PNG, JPEG or WebP file that was validated."""
    start: int
    """Index of its first id in the prompt."""
    length: int
    """Number of its ids in the prompt."""
