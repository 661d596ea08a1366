"""Checks that bytes are a picture: a child process decodes them fully before anything else does.

with closing(ImageCheck(ImageLimits())) as check:
    width, height = check.size("prompt sum-0017: its picture 1", content)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.run.scripts import AskedScript

_MEMORY_FOR_LIBRARIES = 1024**3
_BYTES_A_PIXEL = 16
"""Bytes that decoding holds per pixel, including the decoder's own copies."""


class ImageLimits(NamedTuple):
    """Limits of one picture: pixels, size in bytes, and seconds to decode it."""

    pixels: int = 4096 * 4096
    bytes: int = 20 * 1024**2
    seconds: float = 10.0


class ImageCheck:
    """Decodes pictures in a child process."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        memory = _MEMORY_FOR_LIBRARIES + _BYTES_A_PIXEL * limits.pixels
        self._script = AskedScript(Path(__file__).with_name("decoder.py"), memory)
        self.close = self._script.close

    def size(self, name: str, content: bytes) -> tuple[int, int]:
        """Return width and height in pixels of the picture in `content`, a PNG, JPEG or WebP.

        Raises ConfigError about `name` if it is not a picture or exceeds a limit.
        """
        limits = self._limits
        if len(content) > limits.bytes:
            answer = {"error": f"has {len(content):,} bytes, at most {limits.bytes:,} are read"}
        else:
            question = {**limits._asdict(), "bytes": len(content)}
            answer = self._script.ask(
                json.dumps(question).encode() + b"\n" + content,
                f"was not decoded within {limits.seconds:g} seconds",
            )
        if "error" in answer:
            raise ConfigError(
                name,
                printable(answer["error"]),
                next="correct the row, take it out of the source, or raise the limit",
            )
        return answer["width"], answer["height"]
