"""Read the rows of a CSV file as dicts.

A cell is text, exactly as in the file. A column holds numbers if each of its cells is written as
Python writes that number: `7`, `-1`, `2.5`. With one cell such as `007`, `1.50` or `N/A` all of its
cells are text, because a number would lose the original spelling. `true`, dates and everything else
are text too. An empty cell is null in a column of numbers, and empty text in a column of text.

    for number, row in csv_rows(Path("rows.csv")):
        ...
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from quiver.schemas.errors import quoted_name
from quiver.schemas.plain import bad_text
from quiver.stages.common.json_rows import bad_source

Cell = str | int | float | None


def csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Cell]]]:
    """Yield (row number, cells by column); rows are counted from 1 after the names.

    The file is read twice: first to find the columns of numbers, then for its rows. Raises
    ConfigError.
    """
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
    """Return the number that Python writes exactly as `text`; None if there is none."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if str(number) == text and math.isfinite(number):
            return number
    return None


def _bad_text(text: str) -> str:
    """Return the problem of a text in which bytes that are not UTF-8 became lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    return bad_text(text)


def _problem_of_name(name: str, names: list[str]) -> str:
    """Return the problem of a column's name; "" if there is none."""
    if names.count(name) > 1:
        return "stands more than once"
    if len(names) == 1 and (other := re.search(r"[;|\t]", name)):
        return f"is the only one: commas are expected between cells, and {other[0]!r} stands there"
    return _bad_text(name)


def _text_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    csv.field_size_limit(sys.maxsize)
    # Bytes that are not UTF-8 become lone surrogates, so that the error can name their column.
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            filled = (cells for cells in reader if cells)  # without empty lines
            names = next(filled, [])
            for name in names:
                if problem := _problem_of_name(name, names):
                    raise bad_source(path, f"column {quoted_name(name)} {problem}")
            for number, cells in enumerate(filled, 1):
                place = f"{path} row {number} (line {reader.line_num})"
                if len(cells) != len(names):
                    raise bad_source(
                        place,
                        f"has {len(cells)} cells, and the first line names {len(names)} columns",
                    )
                for name, text in zip(names, cells, strict=True):
                    if problem := _bad_text(text):
                        raise bad_source(place, f"column {quoted_name(name)} {problem}")
                yield number, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            raise bad_source(f"{path} line {reader.line_num}", f"is not CSV: {error}") from None
