"""Pictures and clips in prompts: checking, decoding, and conversion to a model's inputs."""

from __future__ import annotations

from typing import NamedTuple

WORDS = {"image": "picture", "audio": "clip"}
"""What a file of each modality is called."""


class Medium(NamedTuple):
    """A picture or clip in a prompt."""

    modality: str
    """One of `schemas.prompts.MEDIA`."""
    content: bytes
    """A file that was validated."""
    start: int
    """Index of its first id in the prompt."""
    length: int
    """Number of its ids in the prompt."""
