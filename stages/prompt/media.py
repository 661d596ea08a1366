"""Read the media of a source's rows, from the cells of a column or from files beside the source.

A cell is one file or a list of them. A file is `{bytes, path}`, as `datasets.Image` and `Audio`
store it, or bytes, or a path, or base64 text, with or without a data URL's head. Paths start at the
source's folder and may not leave it; nothing is downloaded.

Not of the spine: only prompts with pictures or clips come here.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import printable, reason
from quiver.schemas.manifest import digest
from quiver.schemas.outside import read_path, shape_of
from quiver.schemas.prompts import MEDIA
from quiver.stages.core.files import read_file, sha256_of
from quiver.stages.core.store import Version
from quiver.stages.model.media import WORDS
from quiver.stages.model.media.checking import BYTES_KEYS, FileCheck
from quiver.stages.model.media.processor import load_processor

from .chats import bad_row, naming_row
from .config import SUFFIXES, Config, SourceConfig

_MPEG = [b"\xff" + bytes([second]) for second in (0xE2, 0xE3, 0xF2, 0xF3, 0xFA, 0xFB)]
"""First bytes of an MP3's frame: MPEG 2.5, 2 and 1, with a checksum and without."""
_SIGNATURES = {
    "image": (b"\x89PNG", b"\xff\xd8\xff", b"RIFF", b"GIF8", b"BM", b"II*", b"MM\0*"),
    "audio": (b"RIFF", b"fLaC", b"ID3", *_MPEG, b"OggS"),
}
"""First bytes of files, including the formats that are refused later with a clear error."""
_FORMATS = {"image": "a picture (PNG, JPEG, WebP)", "audio": "a clip (WAV, FLAC, MP3)"}
_ADVICE = "write samples with soundfile.write(buffer, samples, rate, format='WAV')"
File = dict[str, Any]
"""`bytes`, and `path` as written in the source, or None."""


class Media:
    """Reads and checks the pictures and clips of rows, and puts their ids into prompts."""

    def __init__(self, config: Config, policy: Version, modalities: Collection[str]) -> None:
        """Load the policy's processor. Raises ConfigError if it does not read all modalities."""
        self._config = config
        self._processor = load_processor(policy, *modalities)
        self._check = FileCheck(config.by_modality(self._processor.most_seconds))
        self.close = self._check.close

    def of_row(self, name: str, cells: Mapping[str, Any]) -> dict[str, list[File]]:
        """Return the files in the cells of row `name`, by modality; each is decoded once as a
        check. Raises ConfigError."""
        files = {each: read_cell(each, name, cell, self._config) for each, cell in cells.items()}
        for modality, of_modality in files.items():
            for number, file in enumerate(of_modality, 1):
                place = f"{name}: {WORDS[modality]} {number}"
                self._check.require(modality, place, file["bytes"])
        return files

    def expanded(self, name: str, ids: list[int], files: Mapping[str, list[File]]) -> File:
        """Return a prompt's columns with each medium's placeholder expanded. Raises ConfigError.

        They are `prompt_ids`, the files by modality, and their positions (`spans`).
        """
        contents = {modality: [file["bytes"] for file in files[modality]] for modality in files}
        prompt_ids, spans = self._processor.expand(name, ids, contents)
        return {
            "prompt_ids": prompt_ids,
            **{MEDIA[modality]: of_modality for modality, of_modality in files.items()},
            "spans": [span._asdict() for span in spans],
        }


def read_cell(modality: str, name: str, cell: Any, config: Config) -> list[File]:
    """Return the files of row `name`, with their bytes read. Raises ConfigError."""
    files = []
    for place, content, path in _files_in(modality, name, cell):
        with naming_row(place):
            read = _read_file(modality, path, config) if content is None else content
        files.append({"bytes": read, "path": path})
    return files


def _read_file(modality: str, path: str | None, config: Config) -> bytes:
    file = _locate(modality, path, config)
    limit = BYTES_KEYS[modality]
    try:
        return read_file(file, getattr(config, limit.removeprefix("prompt.")))
    except OSError as error:
        raise ValueError(f"{printable(file)} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"{printable(file)} {error} ({limit})") from None


def without_media(table: pa.Table, config: SourceConfig) -> pa.Table:
    """Return the table without the columns of media, which are stored separately."""
    return table.drop_columns([*config.media.values()])


def hash_with_files(table: pa.Table, config: SourceConfig, sha256: str) -> str:
    """Return `sha256` of a source, combined with the hashes of its media's files if there are any.

    Raises ConfigError.
    """
    files = []
    for modality, column in config.media.items():
        cells = table.column(column) if column in table.column_names else ()
        for row, cell in enumerate(cells, 1):
            name = f"row {row} of {printable(config.source)}"
            for place, content, path in _files_in(modality, name, cell.as_py()):
                if content is None:
                    with naming_row(place):
                        files.append(sha256_of(_locate(modality, path, config)))
    return digest([sha256, *files]) if files else sha256


def _files_in(
    modality: str, name: str, cell: Any
) -> Iterator[tuple[str, bytes | None, str | None]]:
    """Yield the name, the bytes or None, and the path of each file in the cell of row `name`."""
    if cell is None or cell == "":  # CSV has no null
        return
    for number, file in enumerate(cell if isinstance(cell, list) else [cell], 1):
        place = f"{name}: {WORDS[modality]} {number}"
        content, path = file, None
        if isinstance(file, dict) and {"bytes", "path"} >= file.keys():
            content, path = file.get("bytes"), file.get("path")
            if isinstance(content, str):  # JSON has no bytes; `quiver show --json` writes base64
                content = _decoded(content) or content
        elif isinstance(file, str):
            content = _decoded(file)
            if content is None or not content.startswith(_SIGNATURES[modality]):
                content, path = None, file
        if not isinstance(content, bytes | None):
            expected = "expected bytes, base64, a path, or {bytes, path}"
            if modality == "audio":
                expected += f": {_ADVICE}"
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


def _locate(modality: str, path: str | None, config: SourceConfig) -> Path:
    """Return the file at a path. Raises ValueError if it is not below the source's folder."""
    if not path:
        raise ValueError("has neither bytes nor a path")
    if str(path).startswith("data:"):
        raise ValueError("is a data URL, and holds no file in base64")
    try:
        path = read_path(path, "path").removeprefix("file://")
    except ValueError as error:
        raise ValueError(f"{error}, and is not {_FORMATS[modality]} in base64") from None
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
        raise ValueError(f"{problem}: put the files beside the source, or their bytes into it")
    if not file.is_file():
        raise ValueError(f"there is no file {printable(file)}")
    return file
