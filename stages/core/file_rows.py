"""Rows of a user's JSON or CSV file, each with its place. Errors name the file and the place.

JSON is strict. A CSV cell is text, exactly as in the file. A CSV column holds numbers if each of
its cells is written as Python writes that number: `7`, `-1`, `2.5`. With one cell such as `007`,
`1.50` or `N/A` all of its cells are text, because a number would lose the original spelling.
`true`, dates, whole numbers of more than 300 digits and everything else are text too. An empty cell
is null in a column of numbers, and empty text in a column of text.

    for place, row in json_rows(Path("rows.jsonl")):       # "line 1", {…}
        ...
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, printable, quoted_name
from quiver.schemas.plain import MOST_DIGITS, bad_text, read_clean_json

Cell = str | int | float | None


def bad_source(place: object, message: str) -> ConfigError:
    """Build the error for a source, or for a line or row in it."""
    return ConfigError(
        f"source {printable(place)}", message, next="correct the source and run again"
    )


def json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each JSON line with its place ("line 3"), or the items of one array ("item 3")."""
    with open(path, "rb") as file:
        beginning = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        while not beginning and (chunk := file.read(1 << 16)):
            beginning = chunk.lstrip()
        file.seek(0)
        if beginning.startswith(b"["):
            for number, row in enumerate(parse_line(file.read(), f"{path}"), 1):
                yield f"item {number}", row
            return
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_line(line, f"{path} line {number}")
            except ConfigError:
                if not _is_object(line) and _is_object(path.read_bytes()):
                    raise bad_source(
                        path,
                        "holds one object over several lines, expected an array of objects, or one "
                        "object per line",
                    ) from None
                raise
            yield f"line {number}", row


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


def csv_rows(path: Path) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yield (place, cells by column); rows are counted from 1 after the names.

    The file is read twice: first to find the columns of numbers, then for its rows. Raises
    ConfigError.
    """
    is_number: dict[str, bool] = {}
    for _, row in _text_rows(path):
        for name, text in row.items():
            if text and is_number.get(name, True):
                is_number[name] = _number(text) is not None
    for place, row in _text_rows(path):
        cells = {name: _number(text) if is_number.get(name) else text for name, text in row.items()}
        yield place, cells


def _number(text: str) -> int | float | None:
    """Return the number that Python writes exactly as `text`; None if there is none, or if it has
    more digits than JSON may have."""
    if len(text.lstrip("-")) > MOST_DIGITS:
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return None


def _text_rows(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    def check(place: object, name: str, text: str) -> None:
        problem = bad_text(text)
        # A byte that is not UTF-8 became a lone surrogate.
        if re.search("[\udc80-\udcff]", text):
            problem = "is not UTF-8"
        if problem:
            raise bad_source(place, f"column {quoted_name(name)} {problem}")

    csv.field_size_limit(sys.maxsize)
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            filled = (cells for cells in reader if cells)  # without empty lines
            names = next(filled, [])
            for name in names:
                check(path, name, name)
                if names.count(name) > 1:
                    raise bad_source(path, f"column {quoted_name(name)} occurs more than once")
            if len(names) == 1 and (other := re.search(r"[;|\t]", names[0])):
                problem = f"expected commas between cells, found {other[0]!r}"
                raise bad_source(path, f"column {quoted_name(names[0])} is the only one: {problem}")
            for number, cells in enumerate(filled, 1):
                place = f"row {number} (line {reader.line_num})"
                if len(cells) != len(names):
                    problem = f"has {len(cells)} cells, and the first line names {len(names)}"
                    raise bad_source(f"{path} {place}", f"{problem} columns")
                row = dict(zip(names, cells, strict=True))
                for name, text in row.items():
                    check(f"{path} {place}", name, text)
                yield place, row
        except csv.Error as error:
            raise bad_source(f"{path} line {reader.line_num}", f"is not CSV: {error}") from None
