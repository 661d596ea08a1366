"""Rows of a CSV file as dicts.

A cell is text, as it stands in the file. A column is numbers if each of its cells is written as
Python writes that number: `7`, `-1`, `2.5`. With one cell such as `007`, `1.50` or `N/A` all of its
cells are text, since a number would not say what stood there. So are `true`, dates and all else. An
empty cell is null among numbers, and empty text among texts.

    for number, row in csv_rows(Path("rows.csv")):
        ...
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from quiver.schemas.errors import printable
from quiver.stages.common.chat.template import bad_text
from quiver.stages.common.json_rows import bad_source

Cell = str | int | float | None


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Cell]]]:
    """(row, its cells by column), rows counted from 1 after the names. The file is read twice: to
    see which columns are numbers, and for its rows. ConfigError."""
    is_number: dict[str, bool] = {}
    for _, row in _text_rows(path):
        for name, text in row.items():
            if text and is_number.get(name, True):
                is_number[name] = _number(text) is not None
    for number, row in _text_rows(path):
        yield (
            number,
            {name: _number(text) if is_number.get(name) else text for name, text in row.items()},
        )


def _number(text: str) -> int | float | None:
    """The number that Python writes exactly as `text`; None if there is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return None


def _text_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    csv.field_size_limit(sys.maxsize)
    # bytes that are not UTF-8 become lone surrogates, so that the column can be named
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        names: list[str] = []
        number = 0
        try:
            for cells in reader:
                if not cells:  # an empty line
                    continue
                place = f"{path} row {number} (line {reader.line_num})"
                if not names:
                    names = cells
                    place = f"{path} line {reader.line_num}"
                    if len(set(names)) < len(names):
                        twice = next(name for name in names if names.count(name) > 1)
                        raise bad_source(place, f"column {printable(twice)} stands more than once")
                _require_cells(place, names, cells)
                if number:
                    yield number, dict(zip(names, cells, strict=True))
                number += 1
        except csv.Error as error:
            raise bad_source(f"{path} line {reader.line_num}", f"is not CSV: {error}") from None


def _require_cells(place: str, names: list[str], cells: list[str]) -> None:
    """ConfigError unless there is one cell of text for each name."""
    if len(cells) != len(names):
        raise bad_source(
            place, f"has {len(cells)} cells, and the first line names {len(names)} columns"
        )
    for name, text in zip(names, cells, strict=True):
        problem = bad_text(text)
        if problem:
            is_utf8 = "NUL" in problem
            raise bad_source(
                place, f"column {printable(name)} {problem if is_utf8 else 'is not UTF-8'}"
            )
