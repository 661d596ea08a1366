"""The child process that decodes pictures which nobody has looked at yet: with limits on pixels,
memory and time.

One line in for each picture: {"bytes": how many follow, "pixels": the most, "seconds": the most},
and then the bytes. One answer a line: {"format", "width", "height"} or {"error"}. What takes too
long is ended by the process's own alarm. It is started as a file, by itself, and imports Pillow and
the standard library alone.
"""

import io
import json
import signal
import sys
import warnings

from PIL import Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
"""Of pixels whose channels have 8 bits at most; Pillow itself takes the upper 8 bits of 16 wherever
there are several channels."""
GREY_16 = ("I;16", "I;16B", "I;16L")
"""Of grey with 16 bits, of which the upper 8 are taken too."""


def measure(content: bytes, most_pixels: int) -> dict[str, object]:
    """Format and size of the picture in `content`, once all of it was decoded. ValueError says why
    it is none; Pillow raises many other types."""
    Image.MAX_IMAGE_PIXELS = None  # the limit below is ours
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise ValueError(f"has {width} × {height} pixels, at most {most_pixels:,} are read")
            # a JPEG's further frames are previews and depth maps, as phones write them
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"has {image.n_frames} frames, expected one picture")
            if image.mode not in (*MODES, *GREY_16):
                raise ValueError(
                    f"has pixels of mode {image.mode}, expected 8 bits a channel: scale them"
                )
            kind = "JPEG" if image.format == "MPO" else image.format
            told = {"format": kind, "width": width, "height": height}
            _as_seen(image)
            return told


def open_image(content: bytes) -> Image.Image:
    """The picture in `content`, which was checked once, upright and as RGB; what is transparent is
    white."""
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
    """Answer for each picture in turn."""
    for line in sys.stdin.buffer:
        question = json.loads(line)
        content = sys.stdin.buffer.read(question["bytes"])
        # SIGALRM keeps its default action, which ends the process wherever it is
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        try:
            answer = measure(content, question["pixels"])
        except ValueError as error:
            answer = {"error": str(error)[:1000]}
        except Image.UnidentifiedImageError:
            answer = {"error": f"is no picture of type {', '.join(FORMATS)}"}
        except Exception as error:  # a decoder may raise anything at hostile bytes
            answer = {"error": f"cannot be decoded: {type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
