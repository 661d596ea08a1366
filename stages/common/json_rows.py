"""Strict JSON lines from a user's file. Errors name the file and the line.

for line, row in json_rows(Path("rows.jsonl")):
    ...
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import read_clean_json


def bad_source(place: object, message: str) -> ConfigError:
    """Build the error for a source, or for a line or row in it."""
    return ConfigError(
        f"source {printable(place)}", message, next="correct the source and run again"
    )


def unit_of(path: Path) -> str:
    """Return the unit that `json_rows` counts: "item" if the file holds one array, else "line"."""
    with open(path, "rb") as file:
        beginning = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        while not beginning and (chunk := file.read(1 << 16)):
            beginning = chunk.lstrip()
    return "item" if beginning.startswith(b"[") else "line"


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (number, row) for JSON lines, or for the items of one array (see `unit_of`)."""
    if unit_of(path) == "item":
        yield from enumerate(parse_line(path.read_bytes(), f"{path}"), 1)
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_line(line, f"{path} line {number}")
            except ConfigError:
                if not _is_object(line) and _is_object(path.read_bytes()):
                    raise bad_source(
                        path,
                        "holds one object over several lines: an array of objects is expected, or "
                        "one object a line",
                    ) from None
                raise
            yield number, row


def _is_object(text: bytes) -> bool:
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict)
    return False


def parse_line(raw: bytes, place: str) -> Any:
    """Parse strict JSON in UTF-8 (see `read_clean_json`). Raises ConfigError that names `place`."""
    try:
        return read_clean_json(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        problem = f"is not UTF-8: byte {byte:#04x} at position {error.start}"
    except json.JSONDecodeError as error:
        problem = f"is not JSON: {printable(error)}"
    except ValueError as error:
        problem = f"cannot be read: {printable(error)}"
    raise bad_source(place, problem)
