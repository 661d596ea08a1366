"""Offer scorers the pictures of prompts.

Not of the spine: only prompts with pictures use this module.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quiver.schemas.prompts import most_images

from .scoring import Batch

OFFERED = "images"
"""Name by which a function asks for pictures: a list of PIL images per row."""


class ImageBytes(bytes):
    """The bytes of a picture. Pickling turns it into a PIL image in a worker of functions."""

    def __reduce__(self) -> Any:
        from quiver.stages.common.images.decoder import open_image

        return open_image, (bytes(self),)


def without_empty(prompts: pa.Table) -> pa.Table:
    """Return `prompts` without the column of pictures if no row has any."""
    if OFFERED in prompts.column_names and not most_images(prompts):
        return prompts.drop_columns(OFFERED)
    return prompts


def offered(prompts: pa.Table) -> list[list[ImageBytes]]:
    """Return the pictures of each row's prompt."""
    rows = prompts[OFFERED].to_pylist()
    return [[ImageBytes(image["bytes"]) for image in row or ()] for row in rows]


def are_in(batch: Batch) -> bool:
    """True if a batch holds pictures. A user's column may have the same name, so values are
    checked."""
    cells = [cell for cell in batch.get(OFFERED, ()) if isinstance(cell, list)]
    return any(isinstance(picture, ImageBytes) for cell in cells for picture in cell)
