"""Decodes untrusted pictures and clips in a child process, with limits on size, memory and time.

For each file, stdin has one line {"modality", "bytes": length, "size": limit, "seconds": limit} and
then the bytes. Each answer is one line: {} or {"error"}. If decoding takes too long, the process's
own alarm ends it. The file runs as a script and imports only Pillow, soundfile and the standard
library.
"""

import io
import json
import os
import signal
import sys
import warnings
from typing import Any

from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
"""Pixel modes with at most 8 bits per channel. Of images with several 16-bit channels, Pillow takes
the upper 8 bits itself."""
GREY_16 = ("I;16", "I;16B", "I;16L")
"""Grey modes with 16 bits; their upper 8 bits are taken."""


SOUNDS = ("WAV", "WAVEX", "FLAC", "MP3")
"""Names of libsndfile; WAVEX is a WAV with a longer head."""
_BLOCK = 65536
"""Samples decoded at a time."""
_MOST_RATE = 192_000


def try_image(content: bytes, most_pixels: float) -> None:
    """Decode the picture in `content` fully.

    Raises ValueError with the reason if it is refused; Pillow raises many other types.
    """
    Image.MAX_IMAGE_PIXELS = None  # `most_pixels` is checked below instead
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise ValueError(
                    f"has {width} × {height} pixels, at most {most_pixels:,.0f} are read"
                )
            # phones write previews and depth maps as further frames of a JPEG
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"has {image.n_frames} frames, expected one picture")
            if image.mode not in (*MODES, *GREY_16):
                raise ValueError(
                    f"has pixels of mode {image.mode}, expected 8 bits a channel: scale them"
                )
            _as_seen(image)


def try_clip(content: bytes, most_seconds: float) -> None:
    """Decode the clip in `content` fully. Raises ValueError with the reason if it is refused."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread reserves memory
    import numpy as np
    import soundfile

    try:
        clip = soundfile.SoundFile(io.BytesIO(content))
    except soundfile.LibsndfileError as error:
        raise ValueError(f"is not a clip of type WAV, FLAC, MP3: {error.error_string}") from None
    with clip:
        if clip.format not in SOUNDS:
            raise ValueError(f"is not a clip of type WAV, FLAC, MP3, but {clip.format}")
        if not 1000 <= clip.samplerate <= _MOST_RATE or clip.channels > 2:
            raise ValueError(
                f"has {clip.channels} channels at {clip.samplerate:,} Hz, expected 1 or 2 at 1,000 "
                f"to {_MOST_RATE:,} Hz"
            )
        num_samples = 0
        while len(samples := clip.read(_BLOCK, "float32", always_2d=True)):
            num_samples += len(samples)
            if num_samples > most_seconds * clip.samplerate:
                raise ValueError(f"is longer than the {most_seconds:g} seconds that are read")
            if not np.isfinite(samples).all():
                raise ValueError("has samples that are no finite numbers")
        if not num_samples:
            raise ValueError("has no samples")


def open_clip(content: bytes, rate: int | None = None) -> tuple[Any, int]:
    """Return the clip in `content`, its channels averaged: [n] float32, and samples a second.

    `content` must have been checked with `try_clip`. With another `rate` than its own, the same
    frequencies are sampled anew.
    """
    import numpy as np
    import soundfile

    samples, own_rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    clip = samples.mean(1)
    if rate in (None, own_rate):
        return clip, own_rate
    count = max(1, round(len(clip) * rate / own_rate))
    # frequencies that the new rate lacks are left out
    resampled = np.fft.irfft(np.fft.rfft(clip.astype(np.float64)), count) * (count / len(clip))
    return resampled.astype(np.float32), rate


def open_image(content: bytes) -> Image.Image:
    """Return the picture in `content`, upright and as RGB, on white where it is transparent.

    `content` must have been checked with `try_image`.
    """
    most_pixels, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            return _as_seen(image)
    finally:
        Image.MAX_IMAGE_PIXELS = most_pixels


def _as_seen(image: Image.Image) -> Image.Image:
    upright = ImageOps.exif_transpose(image)
    if upright.mode in GREY_16:
        transparent = upright.info.pop("transparency", None)
        upright = upright.point(lambda grey: grey / 256).convert("L")
        if transparent is not None:
            upright.info["transparency"] = transparent // 256
    if not upright.has_transparency_data:
        return upright.convert("RGB")
    colours = upright.convert("RGBA")
    ground = Image.new("RGBA", colours.size, "white")
    return Image.alpha_composite(ground, colours).convert("RGB")


TRIED = {"image": try_image, "audio": try_clip}


def main() -> None:
    """Answer one request after another until stdin ends."""
    for line in sys.stdin.buffer:
        question = json.loads(line)
        content = sys.stdin.buffer.read(question["bytes"])
        # the default action of SIGALRM is needed: it ends the process wherever it hangs
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        try:
            TRIED[question["modality"]](content, question["size"])
            answer = {}
        except ValueError as error:
            answer = {"error": str(error)[:1000]}
        except Image.UnidentifiedImageError:
            answer = {"error": f"is not a picture of type {', '.join(FORMATS)}"}
        except Exception as error:  # a decoder may raise anything at hostile bytes
            answer = {"error": f"cannot be decoded: {type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
