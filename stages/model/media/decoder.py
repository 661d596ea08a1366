"""Decodes untrusted pictures in a child process, with limits on pixels, memory and time.

For each picture, stdin has one line {"bytes": length, "pixels": limit, "seconds": limit} and then
the bytes. Each answer is one line: {"width", "height"} or {"error"}. If decoding takes
too long, the process's own alarm ends it. The file runs as a script and imports only Pillow and the
standard library.
"""

import io
import json
import signal
import sys
import warnings

from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
"""Pixel modes with at most 8 bits per channel. Of images with several 16-bit channels, Pillow takes
the upper 8 bits itself."""
GREY_16 = ("I;16", "I;16B", "I;16L")
"""Grey modes with 16 bits, of which the upper 8 are taken too."""


def measure(content: bytes, most_pixels: int) -> dict[str, int]:
    """Decode the picture in `content` fully, and return its size.

    Raises ValueError with the reason if it is refused; Pillow raises many other types.
    """
    Image.MAX_IMAGE_PIXELS = None  # `most_pixels` is checked below instead
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise ValueError(f"has {width} × {height} pixels, at most {most_pixels:,} are read")
            # phones write previews and depth maps as further frames of a JPEG
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"has {image.n_frames} frames, expected one picture")
            if image.mode not in (*MODES, *GREY_16):
                raise ValueError(
                    f"has pixels of mode {image.mode}, expected 8 bits a channel: scale them"
                )
            _as_seen(image)
            return {"width": width, "height": height}


def open_image(content: bytes) -> Image.Image:
    """Return the picture in `content`, upright and as RGB, on white where it is transparent.

    `content` must have been checked with `measure`.
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


def main() -> None:
    """Answer one request after another until stdin ends."""
    for line in sys.stdin.buffer:
        question = json.loads(line)
        content = sys.stdin.buffer.read(question["bytes"])
        # the default action of SIGALRM is needed: it ends the process wherever it hangs
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        try:
            answer = measure(content, question["pixels"])
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
