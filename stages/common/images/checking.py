"""Checks that bytes are a picture: a child process decodes them fully before anything else does.

with ImageCheck(ImageLimits()) as check:
    width, height = check.size("prompt sum-0017: its picture 1", content)
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.runtime.subprocesses import Process

_WORKER = Path(__file__).with_name("decoder.py")
_MEMORY_FOR_LIBRARIES = 1024**3
_BYTES_A_PIXEL = 16
"""Bytes that decoding holds per pixel, including the decoder's own copies."""


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one picture: pixels, size in bytes, and seconds to decode it."""

    pixels: int = 4096 * 4096
    bytes: int = 20 * 1024**2
    seconds: float = 10.0


class ImageCheck:
    """A child process that decodes pictures. If a picture ends it, the next call starts another."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._child: Process | None = None

    def __enter__(self) -> ImageCheck:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child process and wait for it."""
        if self._child is not None:
            self._child.end(grace=0)
            self._child = None

    def size(self, name: str, content: bytes) -> tuple[int, int]:
        """Return width and height in pixels of the picture in `content`, a PNG, JPEG or WebP.

        Raises ConfigError about `name` if it is not a picture or exceeds a limit.
        """
        limits = self._limits
        if len(content) > limits.bytes:
            problem = f"has {len(content):,} bytes, at most {limits.bytes:,} are read"
            raise self._refused(name, problem)
        question = {
            "bytes": len(content),
            "pixels": limits.pixels,
            "seconds": limits.seconds,
        }
        answer = self._ask(json.dumps(question).encode() + b"\n" + content)
        if "error" in answer:
            raise self._refused(name, printable(answer["error"]))
        return answer["width"], answer["height"]

    def _ask(self, question: bytes) -> dict:
        if self._child is None:
            memory = _MEMORY_FOR_LIBRARIES + _BYTES_A_PIXEL * self._limits.pixels
            self._child = Process(
                [sys.executable, "-I", str(_WORKER)],
                limits={resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        try:
            self._child.stdin.write(question)
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        code = self._child.wait()
        self.close()
        if code == -signal.SIGALRM:
            return {"error": f"was not decoded within {self._limits.seconds:g} seconds"}
        return {"error": f"its decoding ended with code {code}"}

    @staticmethod
    def _refused(name: str, problem: str) -> ConfigError:
        return ConfigError(
            name, problem, next="correct the row, take it out of the source, or raise the limit"
        )
