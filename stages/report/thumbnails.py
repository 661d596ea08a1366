"""Show pictures of prompts to people: small ones on a page, one line each in a terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

from .words import size

_SIDE = 192
"""Longest side of a small picture, in pixels."""
MOST = 8
"""Pictures shown of one prompt."""


def data_url(image: dict[str, Any]) -> str:
    """Shrink a picture of prompts/2 and return it as a data URL, so that a page needs no other
    file."""
    from quiver.stages.common.images.decoder import open_image

    small = open_image(image["bytes"])
    small.thumbnail((_SIDE, _SIDE))
    content = io.BytesIO()
    small.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def lines_of(images: Sequence[dict[str, Any]]) -> list[str]:
    """Return one line per picture, such as `PNG, 40 × 20, 2.5 kB, 0.png`."""
    from PIL import Image

    lines = []
    for image in images:
        with Image.open(io.BytesIO(image["bytes"])) as opened:
            about = [opened.format, f"{opened.width} × {opened.height}", size(len(image["bytes"]))]
        lines.append(", ".join([*about, image["path"]] if image["path"] else about))
    return lines
