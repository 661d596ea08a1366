"""Checks that bytes are a picture or clip: a child process decodes them fully before anything else
does.

with closing(FileCheck({"image": Limits(4096**2, "prompt.max_image_pixels")})) as check:
    check.require("image", "prompt sum-0017: its picture 1", content)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.config import Config, Runtime
from quiver.stages.core.processes.scripts import AskedScript

BYTES_KEYS = {"image": "prompt.max_image_bytes", "audio": "prompt.max_audio_bytes"}
"""Keys of the limits of bytes, for errors."""
_MEMORY_FOR_LIBRARIES = 1024**3
_BYTES_A_PIXEL = 16
"""Bytes that decoding holds per pixel, including the decoder's own copies. Clips are decoded in
blocks and need no more."""


class Limits(NamedTuple):
    """Limits of one file."""

    size: float
    """Pixels of a picture, or seconds of a clip."""
    size_name: str
    """What sets `size`, for errors: a key, or the policy."""
    bytes: int = 20 * 1024**2
    decode_seconds: float = 10.0


class MediaLimits(Config):
    """Limits of all pictures and clips that a prompt or an environment shows."""

    max_image_pixels: Runtime[int] = Field(default=4096 * 4096, ge=1)
    """Maximum pixels of a picture; larger pictures are refused."""
    max_image_bytes: Runtime[int] = Field(default=20 * 1024**2, ge=1)
    """Maximum bytes of a picture as it is stored."""
    max_audio_seconds: Runtime[float] = Field(default=300.0, gt=0)
    """Maximum length of a clip; longer ones, and ones that the policy would cut, are refused."""
    max_audio_bytes: Runtime[int] = Field(default=64 * 1024**2, ge=1)
    """Maximum bytes of a clip as it is stored."""
    decode_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Maximum seconds for decoding a picture or clip."""

    def by_modality(self, most_seconds: float) -> dict[str, Limits]:
        """Return the limits of each modality, for a policy that cuts clips after `most_seconds`."""
        image = self.max_image_pixels, "prompt.max_image_pixels"
        audio = self.max_audio_seconds, "prompt.max_audio_seconds"
        audio = min(audio, (most_seconds, "the policy hears no more"))
        return {
            "image": Limits(*image, self.max_image_bytes, self.decode_seconds),
            "audio": Limits(*audio, self.max_audio_bytes, self.decode_seconds),
        }


class FileCheck:
    """Decodes pictures and clips in a child process."""

    def __init__(self, limits: Mapping[str, Limits]) -> None:
        """Set the limits of each modality."""
        self._limits = limits
        pixels = int(limits["image"].size) if "image" in limits else 0
        memory = _MEMORY_FOR_LIBRARIES + _BYTES_A_PIXEL * pixels
        self._script = AskedScript(Path(__file__).with_name("decoder.py"), memory)
        self.close = self._script.close

    def require(self, modality: str, name: str, content: bytes) -> None:
        """Raise ConfigError about `name` unless `content` is a medium of `modality` within the
        limits: a PNG, JPEG or WebP, or a WAV, FLAC or MP3."""
        limits = self._limits[modality]
        if len(content) > limits.bytes:
            problem = f"has {len(content):,} bytes, at most {limits.bytes:,} are read"
            answer = {"error": f"{problem} ({BYTES_KEYS[modality]})"}
        else:
            question = {**limits._asdict(), "modality": modality, "bytes": len(content)}
            answer = self._script.ask(
                json.dumps(question).encode() + b"\n" + content,
                f"was not decoded within {limits.decode_seconds:g} seconds (prompt.decode_seconds)",
            )
        if "error" in answer:
            raise ConfigError(
                name,
                printable(answer["error"]),
                next="correct the row or take it out of the source; if a limit is named, raise it",
            )
