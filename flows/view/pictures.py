"""Pictures drawn with terminal characters; each character shows two pixels, one above the other.

drawn(row["images"], width=100)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.color import Color
from rich.style import Style
from rich.text import Text

from quiver.stages.report.thumbnails import MOST

_SIDE = 48
"""Most pixels of a picture's longer side."""
_HALF_BLOCK = "▀"


def drawn(images: Sequence[dict[str, Any]], width: int) -> Text:
    """Draw the first pictures of a prompt, one below the other."""
    return Text("\n").join(_draw(image["bytes"], min(width, _SIDE)) for image in images[:MOST])


def _draw(content: bytes, side: int) -> Text:
    from quiver.stages.common.images.decoder import open_image

    small = open_image(content)
    small.thumbnail((side, side))
    pixels = np.asarray(small)
    if len(pixels) % 2:
        pixels = np.concatenate([pixels, pixels[-1:]])
    text = Text()
    for upper_row, lower_row in zip(pixels[::2].tolist(), pixels[1::2].tolist(), strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            colours = Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower))
            text.append(_HALF_BLOCK, colours)
        text.append("\n")
    return text
