"""Offer scorers the pictures of prompts.

Not of the spine: only prompts with pictures use this module.
"""

from __future__ import annotations

from typing import Any

from .scoring import Batch

OFFERED = "images"
"""Name by which a function asks for pictures: a list of PIL images per row."""


class ImageBytes(bytes):
    """The bytes of a picture. Pickling turns it into a PIL image in a function's process."""

    def __reduce__(self) -> Any:
        from quiver.stages.model.media.decoder import open_image

        return open_image, (bytes(self),)


def are_in(batch: Batch) -> bool:
    """True if a batch holds pictures. A user's column may have the same name, so values are
    checked."""
    cells = [cell for cell in batch.get(OFFERED, ()) if isinstance(cell, list)]
    return any(isinstance(picture, ImageBytes) for cell in cells for picture in cell)
