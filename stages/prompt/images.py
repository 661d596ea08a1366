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

from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.manifest import digest
from quiver.schemas.outside import read_path
from quiver.stages.common.images.checking import ImageCheck, ImageLimits
from quiver.stages.common.images.processor import load_processor
from quiver.stages.common.store import Version, storage

from .config import SUFFIXES, Config, SourceConfig
from .messages import bad_row, type_name

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
        limits = ImageLimits(
            pixels=config.max_image_pixels,
            bytes=config.max_image_bytes,
            seconds=config.image_seconds,
        )
        self._check = ImageCheck(limits)

    def close(self) -> None:
        """End the process that decodes the pictures."""
        self._check.close()

    def of_cell(self, name: str, cell: Any) -> list[Picture]:
        """Return the pictures of row `name`; each is decoded once as a check. Raises
        ConfigError."""
        pictures = read_cell(name, cell, self._config)
        for number, picture in enumerate(pictures):
            self._check.size(f"{name}: picture {number + 1}", picture["bytes"])
        return pictures

    def expanded(self, name: str, ids: list[int], pictures: list[Picture]) -> dict[str, Any]:
        """Return a prompt's columns with each picture's placeholder expanded. Raises ConfigError.

        They are `prompt_ids`, the pictures (`images`), and their positions (`image_spans`).
        """
        contents = [picture["bytes"] for picture in pictures]
        prompt_ids, spans = self._processor.expand(name, ids, contents)
        image_spans = [span._asdict() for span in spans]
        return {"prompt_ids": prompt_ids, "images": pictures, "image_spans": image_spans}


def read_cell(name: str, cell: Any, config: Config) -> list[Picture]:
    """Return the pictures of row `name`, with their bytes read. Raises ConfigError."""
    pictures = []
    for number, picture in enumerate(_listed(cell)):
        place = f"{name}: picture {number + 1}"
        content, path = _content_and_path(place, picture)
        if content is None:
            content = _read_file(place, path, config)
        pictures.append({"bytes": content, "path": path})
    return pictures


def without_images(table: pa.Table, config: SourceConfig) -> pa.Table:
    """Return the table without the column of pictures, which is stored separately."""
    return table.drop_columns(config.images) if config.images else table


def hash_with_files(table: pa.Table, config: SourceConfig, sha256: str) -> str:
    """Return `sha256` of a source, combined with the hashes of its picture files if there are any.

    Raises ConfigError.
    """
    files = [
        storage.sha256(_locate(place, path, config))
        for place, path in _paths(table.column(config.images), config)
    ]
    return digest([sha256, *files]) if files else sha256


def _paths(column: pa.ChunkedArray, config: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield the name and the path of each picture in a file, in the order of the rows."""
    for chunk in column.chunks:
        for row, scalar in enumerate(chunk):
            place = f"row {row + 1} of {printable(config.source)}"
            for picture in _listed(scalar.as_py()):
                content, path = _content_and_path(place, picture)
                if content is None:
                    yield place, path


def _listed(cell: Any) -> list[Any]:
    if cell is None or cell == "":  # CSV has no null
        return []
    return cell if isinstance(cell, list) else [cell]


def _content_and_path(place: str, picture: Any) -> tuple[bytes | None, str | None]:
    """Return a picture's bytes, or None if it is in a file, and the path in its cell."""
    if isinstance(picture, bytes):
        return picture, None
    if isinstance(picture, dict) and {"bytes", "path"} >= picture.keys():
        content = picture.get("bytes")
        if isinstance(content, str):  # JSON has no bytes; `quiver show --json` writes base64
            content = _decoded(content) or content
        if content is None or isinstance(content, bytes):
            return content, picture.get("path")
        raise bad_row(place, f"bytes holds {type_name(content)}, expected bytes, or base64")
    if isinstance(picture, str):
        content = _decoded(picture)
        if content is not None and content.startswith(_SIGNATURES):
            return content, None
        if picture.startswith("data:"):
            raise bad_row(place, "is a data URL, and holds no picture in base64")
        return None, picture
    raise bad_row(place, f"holds {type_name(picture)}, expected bytes, a path, or {{bytes, path}}")


def _decoded(text: str) -> bytes | None:
    """Return the bytes of base64 `text`, with or without a data URL's head; None if it is no
    base64."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    text = "".join(text.split())  # it may contain line breaks
    with suppress(ValueError):
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    return None


def _read_file(place: str, path: str | None, config: Config) -> bytes:
    file = _locate(place, path, config)
    try:
        return storage.read_file(file, config.max_image_bytes)
    except (OSError, ValueError) as error:
        raise bad_row(place, f"{printable(file)} cannot be read: {reason(error)}") from None


def _locate(place: str, path: str | None, config: SourceConfig) -> Path:
    """Return the file of a picture. Raises ConfigError if it is not below the source's folder."""
    if not path:
        raise bad_row(place, "has neither bytes nor a path")
    try:
        path = read_path(path, "path")
    except ValueError as error:
        problem = f"{error}, and is no picture (PNG, JPEG, WebP) in base64"
        raise bad_row(place, problem) from None
    source = os.path.expanduser(config.source.removeprefix("datasets:"))
    folder = Path(source)
    if not config.source.startswith("datasets:"):
        is_file = folder.suffix in SUFFIXES  # otherwise file.py:function
        folder = Path(source if is_file else source.rpartition(":")[0] or source).parent
    folder = folder.resolve()
    try:
        file = (folder / path.removeprefix("file://")).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links
        raise bad_row(place, f"its path {printable(path)} leads nowhere: {reason(error)}") from None
    if "://" in path.removeprefix("file://") or not file.is_relative_to(folder):
        raise ConfigError(
            place,
            f"its path {printable(path)} leads out of the source's folder, {printable(folder)}",
            next="put the pictures beside the source, or their bytes into it",
        )
    if not file.is_file():
        raise bad_row(place, f"there is no file {printable(file)}")
    return file
