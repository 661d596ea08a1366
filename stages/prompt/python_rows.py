"""Store Python rows in an Arrow table that returns the same values; errors name file and line.

A column gets an Arrow type if all its values survive it: 7 beside 2.5 must stay 7, and an object
must not get keys of other rows. Otherwise it is kept as JSON text (`schemas/cells.py`). If JSON
cannot hold a value either, such as a date beside a number, the row is refused, or a warning says
what changed. Tuples come back as lists, and numpy's numbers and arrays as Python's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas.cells import Cells, holds, json_array
from quiver.schemas.errors import printable, quoted_name
from quiver.schemas.plain import TOO_DEEP, bad_text, is_too_deep
from quiver.stages.common.json_rows import bad_source

CHUNK = 1024
_DISAGREEMENTS = (pa.ArrowException, ValueError, OverflowError, TypeError)
_NULLS_OF_PANDAS = ("NaTType", "NAType")  # Arrow would turn NaT into 0001-01-01
log = logging.getLogger(__name__)


def to_table(source: str, unit: str, rows: Iterable[tuple[int, Any]]) -> pa.Table:
    """Return numbered dict rows as a table. A key that a row does not have is null in its column.

    Raises ConfigError, which names the `unit` and number: line 7 of `source`.
    """
    place = f"{source} {unit}"
    chunks: list[dict[str, pa.ChunkedArray]] = []
    numbers: list[list[int]] = []
    warnings: dict[str, str] = {}
    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        for number, row in chunk:
            if not isinstance(row, dict):
                raise bad_source(
                    f"{place} {number}", f"expected an object, found {type(row).__name__}"
                )
        numbers.append([number for number, _ in chunk])
        names = dict.fromkeys(name for _, row in chunk for name in row)
        for name in names:
            problem = bad_text(name) if isinstance(name, str) else "is no text"
            if problem:
                number = next(number for number, row in chunk if name in row)
                raise bad_source(f"{place} {number}", f"the key {printable(repr(name))} {problem}")
        chunks.append(
            {
                name: _column(
                    place, name, numbers[-1], [row.get(name) for _, row in chunk], warnings
                )
                for name in names
            }
        )
    if not chunks:
        raise bad_source(source, "has no rows")
    columns = {}
    for name in dict.fromkeys(name for columns in chunks for name in columns):
        parts = [
            chunk[name] if name in chunk else pa.chunked_array([pa.nulls(len(rows))])
            for chunk, rows in zip(chunks, numbers, strict=True)
        ]
        columns[name] = _join(place, name, [*chain(*numbers)], parts, warnings)
    for warning in warnings.values():
        log.warning("%s", warning)
    return pa.table(columns)


def _join(
    place: str,
    name: str,
    numbers: list[int],
    parts: list[pa.ChunkedArray],
    warnings: dict[str, str],
) -> pa.ChunkedArray:
    """Join the parts of a column in one type."""
    kinds: list[pa.DataType] = []
    for part in parts:
        if part.type not in (pa.null(), *kinds):
            kinds.append(part.type)
    if any(isinstance(kind, Cells) for kind in kinds):
        with suppress(TypeError):  # part by part: JSON keeps what an Arrow type returns
            arrays = [
                array
                for part in parts
                for array in (
                    part if isinstance(part.type, Cells) else json_array(part.to_pylist())
                ).chunks
            ]
            return pa.chunked_array(arrays)
    if len(kinds) > 1:
        cells = [cell for part in parts for cell in part.to_pylist()]
        return _column(place, name, numbers, cells, warnings)
    kind = kinds[0] if kinds else pa.null()
    arrays = [
        pa.nulls(len(array), kind) if array.type != kind else array
        for part in parts
        for array in part.chunks
    ]
    return pa.chunked_array(arrays, kind)


def _column(
    place: str, name: str, numbers: list[int], cells: list[Any], warnings: dict[str, str]
) -> pa.ChunkedArray:
    """Return the cells of the rows with these numbers, in a type that returns them unchanged.

    Adds changes to `warnings`, by column. Raises ConfigError.
    """
    column = _infer(cells)
    is_kept = column is not None and _gives_back(column, cells)
    if not is_kept or pa.types.is_nested(column.type):
        for number, cell in zip(numbers, cells, strict=True):
            problem = f": {TOO_DEEP}" if is_too_deep(cell) else ""
            if type(cell).__name__ in _NULLS_OF_PANDAS:
                problem = f" holds {cell!r} of pandas, which is a null: give None"
            if problem:
                raise bad_source(f"{place} {number}", f"column {quoted_name(name)}{problem}")
    if is_kept:
        return column
    cells = [_as_python(cell) for cell in cells]
    column = column or _infer(cells)
    if column is not None and _gives_back(column, cells):
        return column
    with suppress(TypeError, ValueError):
        as_json = json_array(cells)
        if _are_kept(cells, as_json.to_pylist(), with_nulls=True):
            return as_json
    if column is None:  # name the first row that does not fit the earlier ones
        for end, number in enumerate(numbers, 1):
            try:
                pa.array(cells[:end])
            except _DISAGREEMENTS as error:
                raise bad_source(
                    f"{place} {number}", f"column {quoted_name(name)}: {printable(error)}"
                ) from None
    changed = [
        (number, cell, kept)
        for number, cell, kept in zip(numbers, cells, column.to_pylist(), strict=True)
        if not _is_kept(cell, kept, with_nulls=True)
    ]
    # Changes of more than the type come first.
    for number, cell, kept in sorted(changed, key=lambda each: _is_equal(*each[1:]))[:1]:
        change = f"{printable(repr(cell))} becomes {printable(repr(kept))}"
        if not _is_equal(cell, kept):
            raise bad_source(
                f"{place} {number}",
                f"column {quoted_name(name)}: {change}: its rows need values of one type",
            )
        warnings.setdefault(name, f"{place} {number}: column {quoted_name(name)}: {change}")
    return column


def _infer(cells: list[Any]) -> pa.ChunkedArray | None:
    """Return the cells in the type that Arrow infers; None if it finds none."""
    try:
        array = pa.array(cells)
    except _DISAGREEMENTS:
        return None
    # Arrow returns chunks for more than 2 GB of text.
    return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def _gives_back(column: pa.ChunkedArray, cells: list[Any]) -> bool:
    kind = column.type
    if pa.types.is_list(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind):
        # Arrow infers these types only for values that it returns unchanged. But it accepts a set
        # as a list at any depth, so lists of lists are compared.
        return not any(isinstance(cell, set | frozenset) for cell in cells)
    kept = column.to_pylist()
    try:
        # Agrees with `_is_kept` for most cells, in a tenth of its time.
        look_same = not holds(column.type, pa.types.is_binary) and all(
            (text := repr(cell)) == repr(after) and ": None" not in text
            for cell, after in zip(cells, kept, strict=True)
        )
        return look_same or _are_kept(cells, kept)
    except RecursionError:
        return False


def _as_python(cell: Any) -> Any:
    """Return `cell` with numpy's numbers and arrays as Python's, and tuples as lists."""
    if isinstance(cell, np.ndarray | np.generic):
        return _as_python(cell.tolist())
    if isinstance(cell, dict):
        return {key: _as_python(member) for key, member in cell.items()}
    if isinstance(cell, list | tuple):
        return [_as_python(item) for item in cell]
    return cell


def _are_kept(cells: list[Any], kept: list[Any], *, with_nulls: bool = False) -> bool:
    return all(
        _is_kept(cell, after, with_nulls=with_nulls)
        for cell, after in zip(cells, kept, strict=True)
    )


def _is_kept(cell: Any, kept: Any, *, with_nulls: bool) -> bool:
    """Return True if `kept` is the same value: same types, same keys, same order.

    Without `with_nulls` a null in an object counts as another value: in an Arrow struct it would
    look like a key that the row does not have.
    """
    if type(cell) is not type(kept):
        return False
    if isinstance(cell, dict):
        return (
            list(cell) == list(kept)
            and (with_nulls or None not in cell.values())
            and _are_kept([*cell.values()], [*kept.values()], with_nulls=with_nulls)
        )
    if isinstance(cell, list):
        return len(cell) == len(kept) and _are_kept(cell, kept, with_nulls=with_nulls)
    if isinstance(cell, str | bytes | int | float):
        return cell == kept or repr(cell) == repr(kept)  # NaN equals itself only by its repr
    return str(cell) == str(kept)  # distinguishes 1.0 from 1.00, and 10:00+00:00 from 12:00+02:00


def _is_equal(cell: Any, kept: Any) -> bool:
    """Return True if `kept` differs at most in types, and in keys that became null."""
    if isinstance(cell, dict) and isinstance(kept, dict):
        return all(_is_equal(cell.get(key), member) for key, member in kept.items())
    if isinstance(cell, list) and isinstance(kept, list):
        return all(map(_is_equal, cell, kept))
    return cell == kept or str(cell) == str(kept)
