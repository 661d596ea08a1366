"""What scorers are told of the pictures that prompts show.

Not of the spine: only prompts with pictures come here.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quiver.schemas.prompts import most_images

from .scoring import Batch

OFFERED = "images"
"""What a function asks for by name: a list of PIL images a row."""


class ImageBytes(bytes):
    """The bytes of a picture. A process of functions gets a PIL image for it."""

    def __reduce__(self) -> Any:
        from quiver.stages.common.images.decoder import open_image

        return open_image, (bytes(self),)


def without_empty(prompts: pa.Table) -> pa.Table:
    """`prompts` without the column of pictures, where none shows any."""
    if OFFERED in prompts.column_names and not most_images(prompts):
        return prompts.drop_columns(OFFERED)
    return prompts


def offered(prompts: pa.Table) -> dict[str, list[list[ImageBytes]]]:
    """The pictures of each row's prompt; nothing where the prompts have no such column."""
    if OFFERED not in prompts.column_names:
        return {}
    rows = prompts[OFFERED].to_pylist()
    return {OFFERED: [[ImageBytes(image["bytes"]) for image in row or ()] for row in rows]}


def are_in(batch: Batch) -> bool:
    """Whether a batch holds pictures, under a name that a user's column might have too."""
    cells = batch.get(OFFERED, ())
    return any(isinstance(picture, ImageBytes) for cell in cells for picture in _listed(cell))


def _listed(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else []
