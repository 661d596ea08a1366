"""Store rows as Arrow columns that return the same values; errors name file and row.

`to_table` takes Python rows. A column gets an Arrow type if all its values survive it: 7 beside 2.5
must stay 7, and an object must not get keys of other rows. Otherwise it is kept as JSON text
(`schemas/cells.py`). A value that neither can hold, such as a date beside a number, is refused.
Tuples come back as lists, and numpy's numbers and arrays as Python's.

`plain_table` takes columns of Arrow files. Views and runs become plain lists, texts and numbers,
also inside lists and structs. So do floats of 16 and 32 bits: 0.1 in such a column becomes 0.1, not
0.10000000149011612. JSON and maps stay, and give Python values (`schemas/cells.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas.cells import Cells, holds, json_array, wrap
from quiver.schemas.errors import ConfigError, printable, quoted_name
from quiver.schemas.plain import TOO_DEEP, bad_text, is_too_deep, read_clean_json
from quiver.stages.core.file_rows import bad_source

CHUNK = 1024
_JSON = pa.json_()
_SHORT_FLOATS = {pa.float16(): np.float16, pa.float32(): np.float32}
_PLAIN = {
    **dict.fromkeys(_SHORT_FLOATS, pa.float64()),
    pa.string_view(): pa.large_string(),
    pa.binary_view(): pa.large_binary(),
}
_BAD_VALUES = (ValueError, TypeError, OverflowError, pa.ArrowException)  # of Arrow's conversions
_NULLS_OF_PANDAS = ("NaTType", "NAType")  # Arrow would turn NaT into 0001-01-01


# -- rows of Python


def to_table(source: str, rows: Iterable[tuple[str, Any]]) -> pa.Table:
    """Return dict rows as a table. A key that a row does not have is null in its column.

    Args:
        source: The source's name in errors.
        rows: Each with its place in the source, such as "line 7".

    Raises ConfigError, which names source and place.
    """
    rows = iter(rows)
    places: list[list[str]] = []
    chunks: list[dict[str, pa.ChunkedArray]] = []
    while chunk := list(islice(rows, CHUNK)):
        places.append([f"{source} {place}" for place, _ in chunk])
        names: dict[str, None] = {}
        for place, (_, row) in zip(places[-1], chunk, strict=True):
            if not isinstance(row, dict):
                raise bad_source(place, f"expected an object, found {type(row).__name__}")
            for name in row.keys() - names.keys():
                problem = bad_text(name) if isinstance(name, str) else "is not text"
                if problem:
                    raise bad_source(place, f"the key {printable(repr(name))} {problem}")
            names |= dict.fromkeys(row)
        chunks.append(
            {name: _column(name, places[-1], [row.get(name) for _, row in chunk]) for name in names}
        )
    if not chunks:
        raise bad_source(source, "has no rows")
    columns = {}
    for name in dict.fromkeys(chain(*chunks)):
        pieces = [
            chunk[name] if name in chunk else pa.chunked_array([pa.nulls(len(rows))])
            for chunk, rows in zip(chunks, places, strict=True)
        ]
        kinds: list[pa.DataType] = []
        for piece in pieces:
            if piece.type not in (pa.null(), *kinds):
                kinds.append(piece.type)
        if len(kinds) > 1:
            cells = [cell for piece in pieces for cell in piece.to_pylist()]
            columns[name] = _column(name, [*chain(*places)], cells)
            continue
        kind = kinds[0] if kinds else pa.null()
        arrays = chain(*(piece.chunks for piece in pieces))
        columns[name] = pa.chunked_array(
            [array if array.type == kind else pa.nulls(len(array), kind) for array in arrays], kind
        )
    return pa.table(columns)


def _column(name: str, places: list[str], cells: list[Any]) -> pa.ChunkedArray:
    """Return the cells of the rows at `places` in a type that returns them unchanged.

    Raises ConfigError.
    """
    column = _infer(cells)
    is_kept = column is not None and _gives_back(column, cells)
    if not is_kept or pa.types.is_nested(column.type):
        for place, cell in zip(places, cells, strict=True):
            if is_too_deep(cell):
                raise _bad_value(place, name, TOO_DEEP)
            if type(cell).__name__ in _NULLS_OF_PANDAS:
                raise _bad_value(place, name, f"{cell!r} of pandas is a null: give None")
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
        for end, place in enumerate(places, 1):
            try:
                _to_arrow(cells[:end])
            except _BAD_VALUES as error:
                raise _bad_value(place, name, printable(error)) from None
    for place, cell, kept in zip(places, cells, column.to_pylist(), strict=True):
        if not _is_kept(cell, kept, with_nulls=True):
            change = f"{printable(repr(cell))} becomes {printable(repr(kept))}"
            raise _bad_value(place, name, f"{change}: its rows need values of one type")
    return column


def _bad_value(place: str, name: str, problem: str) -> ConfigError:
    return bad_source(place, f"column {quoted_name(name)}: {problem}")


def _infer(cells: list[Any]) -> pa.ChunkedArray | None:
    """Return the cells in the type that Arrow infers; None if it finds none."""
    try:
        return _to_arrow(cells)
    except _BAD_VALUES:
        return None


def _to_arrow(cells: list[Any]) -> pa.ChunkedArray:
    """Return the cells in the type that Arrow infers. Raises one of _BAD_VALUES if it finds none,
    or if Python cannot hold what Arrow makes of them: a large number beside a date becomes a date
    beyond the year 9999."""
    array = pa.array(cells)
    if holds(array.type, pa.types.is_temporal):
        array.to_pylist()
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


# -- columns of Arrow files


def plain_table(source: str, table: pa.Table) -> pa.Table:
    """Return `table` with plain columns.

    Raises ConfigError, with row and column, for a value that Python cannot hold, such as a date
    after the year 9999.
    """
    columns = {}
    for name in table.column_names:
        column = table.column(name)
        kind = _plain_type(column.type)
        if pa.types.is_dictionary(kind) and any(
            each.dictionary.null_count for each in column.chunks
        ):
            kind = kind.value_type  # Arrow cannot join dictionaries that hold nulls
        if kind != column.type:
            try:
                column = _rebuilt(kind, _values(source, name, column))
            except pa.ArrowException as error:
                problem = f"column {quoted_name(name)} of type {column.type}: {printable(error)}"
                raise bad_source(source, problem) from None
        columns[name] = wrapped = wrap(column)
        # Read every value now, so that the error for an unreadable one names its row.
        if wrapped is not column or holds(column.type, pa.types.is_temporal):
            for unread in (column, wrapped):
                for _ in _values(source, name, unread):
                    pass
    return pa.table(columns)


def _values(source: str, name: str, column: pa.ChunkedArray) -> Iterator[Any]:
    for row, scalar in enumerate(column, 1):
        try:
            yield _as_written(scalar.as_py(), scalar.type)
        except _BAD_VALUES as error:
            raise _bad_value(f"{source} row {row}", name, printable(error)) from None


def _as_written(value: Any, kind: pa.DataType) -> Any:
    """Return `value`, which Arrow's `as_py` gave for the type `kind`, with short floats made exact.

    A short float becomes the shortest decimal that stands for it. Whole numbers stay, because the
    type holds them exactly. Raises ValueError for JSON that cannot be read.
    """
    if isinstance(kind, pa.JsonType) and value is not None:
        read_clean_json(value)
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, Cells):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    if value is None or isinstance(kind, Cells):
        return value
    if kind in _SHORT_FLOATS:
        return value if value.is_integer() else float(str(_SHORT_FLOATS[kind](value)))
    if pa.types.is_struct(kind):
        return {field.name: _as_written(value[field.name], field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(key, _as_written(item, kind.item_type)) for key, item in value]
    if kind.num_fields:
        return [_as_written(item, kind.value_type) for item in value]
    return value


def _rebuilt(kind: pa.DataType, values: Iterator[Any]) -> pa.ChunkedArray:
    """Return a column of `values`. Arrow's own casts are missing for runs, and wrong for list
    views."""
    arrays = []
    while chunk := list(islice(values, CHUNK)):
        # Arrays of JSON can be made only from arrays of text.
        arrays.append(pa.array(chunk, _plain_type(kind, json=pa.string())).cast(kind))
    return pa.chunked_array(arrays, kind)


def _plain_type(kind: pa.DataType, json: pa.DataType = _JSON) -> pa.DataType:
    """Return `kind` without views, runs and short floats. `json` is the type to use for JSON."""
    if isinstance(kind, pa.JsonType):
        return json
    if isinstance(kind, pa.BaseExtensionType):
        storage = _plain_type(kind.storage_type, json)
        return kind if storage == kind.storage_type else storage
    if kind in _PLAIN:
        return _PLAIN[kind]
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        values = _plain_type(kind.value_type, json)
        return kind if pa.types.is_dictionary(kind) and values == kind.value_type else values
    fields = [kind.field(index) for index in range(kind.num_fields)]
    plain = [field.with_type(_plain_type(field.type, json)) for field in fields]
    if pa.types.is_struct(kind):
        kind = pa.struct(plain)
    elif pa.types.is_map(kind):
        kind = pa.map_(*plain[0].type, keys_sorted=kind.keys_sorted)
    elif plain != fields or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        kind = pa.large_list(plain[0])
    return kind
