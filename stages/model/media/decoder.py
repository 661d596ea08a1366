"""Decodes untrusted pictures and clips in a child process, with limits on size, memory and time.

For each file, stdin has one line {"modality", "bytes": length, "size": limit, "size_name",
"decode_seconds": limit} and then the bytes. Each answer is one line: {} or {"error"}. If decoding
takes too long, the process's own alarm ends it. The file runs as a script and imports only Pillow,
soundfile, numpy and the standard library.

`open_image` and `open_clip` decode a file that was checked, in any process.
"""

import hashlib
import io
import json
import os
import signal
import struct
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps

PICTURES = ("PNG", "JPEG", "WEBP")
"""Names of Pillow."""
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")
"""Pixel modes with at most 8 bits per channel. Of images with several 16-bit channels, Pillow takes
the upper 8 bits itself."""
GREY_16 = ("I;16", "I;16B", "I;16L")
"""Grey modes with 16 bits; their upper 8 bits are taken."""

CLIPS = ("WAV", "WAVEX", "FLAC", "MP3")
"""Names of libsndfile; WAVEX is a WAV with a longer head."""
_BLOCK = 65536
"""Samples decoded at a time."""
_MOST_RATE = 192_000
_AGAIN = "encode it again, or as FLAC"
_UNKNOWN = 2**62
"""libsndfile gives more samples than this to a file that does not say how many it has."""
_STREAMED = 0xFFFFFFFF
"""Size in a WAV's header if its length was unknown; with 0, no samples are read."""
_FLAC_BYTES = {"PCM_S8": 1, "PCM_16": 2, "PCM_24": 3}
"""Bytes of a sample of a FLAC, by libsndfile's name."""
_MP3_RATES = (44_100, 48_000, 32_000)
"""Samples a second in MPEG 1, by the header's two bits."""
_MP3_HALVINGS = (2, 0, 1, 0)
"""How often these are halved in MPEG 2.5, none, 2 and 1, by the header's two bits."""
_MP3_KILOBITS = {
    True: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Kilobits a second of layer III, for MPEG 1 or not, by the header's four bits."""
_MP3_DELAY = 4
"""Frames by which the length may differ: encoders put silence at both ends, which is left out."""


def try_image(content: bytes, most_pixels: float, limit: str) -> None:
    """Decode the picture in `content` fully. `limit` names the limit `most_pixels`.

    Raises ValueError with the reason if it is refused; Pillow raises many other types.
    """
    Image.MAX_IMAGE_PIXELS = None  # `most_pixels` is checked below instead
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(content), formats=PICTURES) as image:
            width, height = image.size
            if width * height > most_pixels:
                raise ValueError(
                    f"has {width} × {height} pixels, at most {most_pixels:,.0f} are read ({limit})"
                )
            # phones write previews and depth maps as further frames of a JPEG
            if image.format != "MPO" and getattr(image, "n_frames", 1) > 1:
                raise ValueError(f"has {image.n_frames} frames, expected one picture")
            if image.mode not in (*MODES, *GREY_16):
                raise ValueError(
                    f"has pixels of mode {image.mode}, expected 8 bits a channel: scale them"
                )
            _as_seen(image)


def try_clip(content: bytes, most_seconds: float, limit: str) -> None:
    """Decode the clip in `content` fully. `limit` names the limit `most_seconds`.

    Raises ValueError with the reason if it is refused.
    """
    import numpy as np
    import soundfile

    try:
        clip = soundfile.SoundFile(io.BytesIO(content))
    except soundfile.LibsndfileError as error:
        raise ValueError(f"is not a clip of type WAV, FLAC, MP3: {error.error_string}") from None
    with clip:
        if clip.format not in CLIPS:
            raise ValueError(f"is not a clip of type WAV, FLAC, MP3, but {clip.format}")
        if not 1000 <= clip.samplerate <= _MOST_RATE or clip.channels > 2:
            raise ValueError(
                f"has {clip.channels} channels at {clip.samplerate:,} Hz, expected 1 or 2 at 1,000 "
                f"to {_MOST_RATE:,} Hz"
            )
        if clip.frames > _UNKNOWN:
            raise ValueError(f"does not say how long it is: {_AGAIN}")
        digest = hashlib.md5(usedforsecurity=False)
        width = _FLAC_BYTES.get(clip.subtype, 0) if clip.format == "FLAC" else 0
        num_samples = 0
        try:
            for samples in _blocks(clip, "int32" if width else "float32"):
                num_samples += len(samples)
                if num_samples > most_seconds * clip.samplerate:
                    raise ValueError(
                        f"is longer than the {most_seconds:g} seconds that are read ({limit})"
                    )
                if not np.isfinite(samples).all():
                    raise ValueError("has samples that are no finite numbers")
                if width:  # a FLAC's MD5 is of its integers, which are the upper bytes here
                    of_each = samples.astype("<i4").view("u1").reshape(-1, 4)
                    digest.update(of_each[:, -width:].tobytes())
        except soundfile.LibsndfileError as error:
            raise ValueError(f"is cut or damaged: {error.error_string} {_AGAIN}") from None
        if not num_samples:
            raise ValueError("has no samples")
        _require_whole(clip.format, content, num_samples / clip.samplerate, digest.digest())


def _blocks(clip: Any, dtype: str) -> Iterator[Any]:
    """Yield the samples of an open clip, [n, channels]; its header may promise any number."""
    while len(samples := clip.read(_BLOCK, dtype, always_2d=True)):
        yield samples


def _require_whole(kind: str, content: bytes, seconds: float, md5: bytes) -> None:
    """Raise ValueError unless the `seconds` that were decoded, with this MD5, are all of a file."""
    if kind == "MP3":
        _require_whole_mp3(content, seconds)
    elif kind == "FLAC":
        _require_whole_flac(content, md5)
    else:
        _require_whole_wav(content)


def _require_whole_wav(content: bytes) -> None:
    """Raise ValueError if a WAV holds fewer bytes of samples than its header says."""
    at = len("RIFFsizeWAVE")
    while at + 8 <= len(content):
        name, size = struct.unpack_from("<4sI", content, at)
        at += 8
        if name == b"data":
            if size != _STREAMED and at + size > len(content):
                raise ValueError(
                    f"is cut: its header says {size:,} bytes of samples, and {len(content) - at:,} "
                    f"are there: {_AGAIN}"
                )
            return
        at += size + size % 2


def _require_whole_flac(content: bytes, md5: bytes) -> None:
    """Raise ValueError if a FLAC names another MD5 of its samples; some name none."""
    start = _after_id3(content) + len("fLaC") + 4  # bytes before the first block's content
    named = content[start + 18 : start + 34]
    if any(named) and named != md5:
        raise ValueError(f"has other samples than its header says, by their MD5: {_AGAIN}")


def _require_whole_mp3(content: bytes, seconds: float) -> None:
    """Raise ValueError unless the frames of an MP3 last `seconds`, which were decoded.

    Without the number of frames in its first frame, the decoder guesses it and stops there.
    """
    at = _after_id3(content)
    found, frame_seconds, promised = 0.0, 0.0, None
    while at + 4 <= len(content):
        head = int.from_bytes(content[at : at + 4])
        version, layer, bits, rate = head >> 19 & 3, head >> 17 & 3, head >> 12 & 15, head >> 10 & 3
        if head >> 21 != 0x7FF or version == 1 or layer != 1 or bits in (0, 15) or rate == 3:
            break  # a tag at the end
        is_mpeg_1 = version == 3  # 2 and 2.5 have half of its samples a frame
        hertz = _MP3_RATES[rate] >> _MP3_HALVINGS[version]
        size = (144 if is_mpeg_1 else 72) * _MP3_KILOBITS[is_mpeg_1][bits] * 1000 // hertz
        size += head >> 9 & 1
        frame = content[at : at + size]
        if len(frame) < size:
            raise ValueError(f"is cut: it ends within a frame: {_AGAIN}")
        at += size
        tag = next((frame.find(name) for name in (b"Xing", b"Info") if name in frame[:48]), None)
        if not found and promised is None and tag is not None:  # a first frame without samples
            has_number = frame[tag + 7] & 1
            promised = int.from_bytes(frame[tag + 8 : tag + 12]) if has_number else 0
            continue
        frame_seconds = (1152 if is_mpeg_1 else 576) / hertz
        found += frame_seconds
    if not found:
        raise ValueError(f"has no frame where its samples should begin: {_AGAIN}")
    says = seconds if not promised else promised * frame_seconds
    if max(abs(says - found), abs(seconds - found)) > _MP3_DELAY * frame_seconds:
        raise ValueError(f"says {says:.2f} s, its frames are {found:.2f} s: {_AGAIN}")


def _after_id3(content: bytes) -> int:
    """Return where a file begins behind its ID3v2 tags, whose size has 7 bits a byte."""
    at = 0
    while content.startswith(b"ID3", at):
        size = 0
        for byte in content[at + 6 : at + 10]:
            size = size << 7 | byte
        at += 10 + size
    return at


def open_clip(content: bytes, rate: int | None = None) -> tuple[Any, int]:
    """Return the clip in `content`, its channels averaged: [n] float32, and samples a second.

    `content` must have been checked with `try_clip`. If `rate` is given, the clip is resampled to
    it, by its Fourier transform.
    """
    import numpy as np
    import soundfile

    with soundfile.SoundFile(io.BytesIO(content)) as opened:
        own_rate = opened.samplerate
        clip = np.concatenate([samples.mean(1) for samples in _blocks(opened, "float32")])
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
        with Image.open(io.BytesIO(content), formats=PICTURES) as image:
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
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread of numpy reserves memory
    checks = {"image": try_image, "audio": try_clip}
    for line in sys.stdin.buffer:
        question = json.loads(line)
        content = sys.stdin.buffer.read(question["bytes"])
        # the default action of SIGALRM is needed: it ends the process wherever it hangs
        signal.setitimer(signal.ITIMER_REAL, question["decode_seconds"])
        try:
            checks[question["modality"]](content, question["size"], question["size_name"])
            answer = {}
        except ValueError as error:
            answer = {"error": str(error)[:1000]}
        except Image.UnidentifiedImageError:
            answer = {"error": f"is not a picture of type {', '.join(PICTURES)}"}
        except Exception as error:  # a decoder may raise anything at hostile bytes
            answer = {"error": f"cannot be decoded: {type(error).__name__}: {error}"[:1000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
