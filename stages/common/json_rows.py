"""Strict JSON lines of a user's file. What is wrong is named by file and line.

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
from quiver.schemas.plain import bad_text, finite_float, no_constant, no_key_twice


def bad_source(place: object, message: str) -> ConfigError:
    """The error for a source, or a line or row of it."""
    return ConfigError(
        f"source {printable(place)}", message, next="correct the source and run again"
    )


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, row): of JSON lines, or of one array of objects (then `line` counts its items)."""
    with open(path, "rb") as file:
        beginning = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        while not beginning and (chunk := file.read(1 << 16)):
            beginning = chunk.lstrip()
        if beginning.startswith(b"["):
            yield from enumerate(parse(f"{path}", path.read_bytes()), 1)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse(f"{path} line {number}", line)
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


def parse(place: str, raw: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no number beyond floats, no key twice, no NUL and no lone
    surrogate in any text. ConfigError names `place`."""
    try:
        text = raw.decode("utf-8-sig")
        parsed = json.loads(
            text,
            object_pairs_hook=no_key_twice,
            parse_constant=no_constant,
            parse_float=finite_float,
        )
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise bad_source(
            place, f"is not UTF-8: byte {byte:#04x} at position {error.start}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise bad_source(place, f"is not JSON: {printable(error)}") from None
    if "\\u" in text:
        try:
            _require_text(place, parsed)
        except RecursionError:
            raise bad_source(place, "is nested too deeply") from None
    return parsed


def _require_text(place: str, node: Any) -> None:
    if isinstance(node, str):
        problem = bad_text(node)
        if problem:
            raise bad_source(place, problem)
    elif isinstance(node, list):
        for child in node:
            _require_text(place, child)
    elif isinstance(node, dict):
        _require_text(place, [*node, *node.values()])
