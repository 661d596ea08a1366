"""Offer scorers the pictures and clips of prompts.

Not of the spine: only prompts with pictures or clips use this module.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from quiver.schemas.prompts import MEDIA

from .scoring import Batch

OFFERED = tuple(MEDIA.values())
"""Names by which a function asks for media, a list per row: of PIL images, or of clips, each
(samples, rate), float32 of one channel."""


class ImageBytes(bytes):
    """The bytes of a picture. Pickling turns it into a PIL image in a function's process."""

    def __reduce__(self) -> Any:
        from quiver.stages.model.media.decoder import open_image

        return open_image, (bytes(self),)


class ClipBytes(bytes):
    """The bytes of a clip. Pickling turns it into samples and rate in a function's process."""

    def __reduce__(self) -> Any:
        from quiver.stages.model.media.decoder import open_clip

        return open_clip, (bytes(self),)


def lists_of(column: str, files: pa.ChunkedArray) -> list[list[bytes]]:
    """Return the files of each row of a column of prompts."""
    kind = ClipBytes if column == MEDIA["audio"] else ImageBytes
    return [[kind(file["bytes"]) for file in row or ()] for row in files.to_pylist()]


def names_in(batch: Batch) -> set[str]:
    """Return the names of `OFFERED` whose lists hold media. A user's column may have the same name,
    so values are checked."""
    return {
        name
        for name in OFFERED
        for cell in batch.get(name, ())
        if isinstance(cell, list) and any(isinstance(file, ImageBytes | ClipBytes) for file in cell)
    }
