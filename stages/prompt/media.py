"""Read the pictures of a source's rows, from the cells of a column or from files beside the source.

A cell is one picture or a list of them. A picture is `{bytes, path}`, as `datasets.Image` stores
it, or bytes, or a path, or base64 text, with or without a data URL's head. Paths start at the
source's folder and may not leave it; nothing is downloaded.

Not of the spine: only prompts with pictures come here.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import printable, reason
from quiver.schemas.manifest import digest
from quiver.schemas.outside import read_path, shape_of
from quiver.stages.core.files import read_file, sha256_of
from quiver.stages.core.store import Version
from quiver.stages.model.media.checking import ImageCheck, ImageLimits
from quiver.stages.model.media.processor import load_processor

from .chats import bad_row, naming_row
from .config import SUFFIXES, Config, SourceConfig

_SIGNATURES = (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*", b"MM\0*")
"""First bytes of picture files, including the formats that are refused later with a clear error."""
Picture = dict[str, Any]
"""`bytes`, and `path` as written in the source, or None."""


class Pictures:
    """Reads and checks the pictures of rows, and puts their ids into prompts."""

    def __init__(self, config: Config, policy: Version) -> None:
        """Load the policy's processor. Raises ConfigError if the policy sees no pictures."""
        self._config = config
        self._processor = load_processor(policy)
        limits = ImageLimits(config.max_image_pixels, config.max_image_bytes, config.image_seconds)
        self._check = ImageCheck(limits)
        self.close = self._check.close

    def of_cell(self, name: str, cell: Any) -> list[Picture]:
        """Return the pictures of row `name`; each is decoded once as a check. Raises
        ConfigError."""
        pictures = read_cell(name, cell, self._config)
        for number, picture in enumerate(pictures, 1):
            self._check.size(f"{name}: picture {number}", picture["bytes"])
        return pictures

    def expanded(self, name: str, ids: list[int], pictures: list[Picture]) -> dict[str, Any]:
        """Return a prompt's columns with each picture's placeholder expanded. Raises ConfigError.

        They are `prompt_ids`, the pictures (`images`), and their positions (`spans`).
        """
        contents = [picture["bytes"] for picture in pictures]
        prompt_ids, spans = self._processor.expand(name, ids, {"image": contents})
        span_rows = [span._asdict() for span in spans]
        return {"prompt_ids": prompt_ids, "images": pictures, "spans": span_rows}


def read_cell(name: str, cell: Any, config: Config) -> list[Picture]:
    """Return the pictures of row `name`, with their bytes read. Raises ConfigError."""
    pictures = []
    for place, content, path in _pictures_in(name, cell):
        with naming_row(place):
            read = _read_file(path, config) if content is None else content
        pictures.append({"bytes": read, "path": path})
    return pictures


def _read_file(path: str | None, config: Config) -> bytes:
    file = _locate(path, config)
    try:
        return read_file(file, config.max_image_bytes)
    except (OSError, ValueError) as error:
        raise ValueError(f"{printable(file)} cannot be read: {reason(error)}") from None


def without_images(table: pa.Table, config: SourceConfig) -> pa.Table:
    """Return the table without the column of pictures, which is stored separately."""
    return table.drop_columns(config.images) if config.images else table


def hash_with_files(table: pa.Table, config: SourceConfig, sha256: str) -> str:
    """Return `sha256` of a source, combined with the hashes of its picture files if there are any.

    Raises ConfigError.
    """
    files = []
    for row, cell in enumerate(table.column(config.images), 1):
        name = f"row {row} of {printable(config.source)}"
        for place, content, path in _pictures_in(name, cell.as_py()):
            if content is None:
                with naming_row(place):
                    files.append(sha256_of(_locate(path, config)))
    return digest([sha256, *files]) if files else sha256


def _pictures_in(name: str, cell: Any) -> Iterator[tuple[str, bytes | None, str | None]]:
    """Yield the name, the bytes or None, and the path of each picture in the cell of row `name`."""
    if cell is None or cell == "":  # CSV has no null
        return
    for number, picture in enumerate(cell if isinstance(cell, list) else [cell], 1):
        place = f"{name}: picture {number}"
        content, path = picture, None
        if isinstance(picture, dict) and {"bytes", "path"} >= picture.keys():
            content, path = picture.get("bytes"), picture.get("path")
            if isinstance(content, str):  # JSON has no bytes; `quiver show --json` writes base64
                content = _decoded(content) or content
        elif isinstance(picture, str):
            content = _decoded(picture)
            if content is None or not content.startswith(_SIGNATURES):
                content, path = None, picture
        if not isinstance(content, bytes | None):
            expected = "expected bytes, base64, a path, or {bytes, path}"
            raise bad_row(place, f"holds {shape_of(content)}, {expected}")
        yield place, content, path


def _decoded(text: str) -> bytes | None:
    """Return the bytes of base64 `text`, with or without a data URL's head; None if it is no
    base64."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    text = "".join(text.split())  # it may contain line breaks
    with suppress(ValueError):
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    return None


def _locate(path: str | None, config: SourceConfig) -> Path:
    """Return the file of a picture. Raises ValueError if it is not below the source's folder."""
    if not path:
        raise ValueError("has neither bytes nor a path")
    if str(path).startswith("data:"):
        raise ValueError("is a data URL, and holds no picture in base64")
    try:
        path = read_path(path, "path").removeprefix("file://")
    except ValueError as error:
        raise ValueError(f"{error}, and is not a picture (PNG, JPEG, WebP) in base64") from None
    source = os.path.expanduser(config.source.removeprefix("datasets:"))
    folder = Path(source)
    if not config.source.startswith("datasets:"):
        is_file = folder.suffix in SUFFIXES  # otherwise file.py:function
        folder = Path(source if is_file else source.rpartition(":")[0] or source).parent
    folder = folder.resolve()
    try:
        file = (folder / path).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ValueError(f"its path {printable(path)} leads nowhere: {reason(error)}") from None
    if "://" in path or not file.is_relative_to(folder):
        problem = (
            f"its path {printable(path)} leads out of the source's folder, {printable(folder)}"
        )
        raise ValueError(f"{problem}: put the pictures beside the source, or their bytes into it")
    if not file.is_file():
        raise ValueError(f"there is no file {printable(file)}")
    return file
