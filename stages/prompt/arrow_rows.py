"""Convert foreign Arrow columns to types that `take` supports and whose values Python can hold.

Views and runs become plain lists, texts and numbers, also inside lists and structs. So do floats of
16 and 32 bits: 0.1 in such a column becomes 0.1, not 0.10000000149011612. `schemas/cells.py` turns
JSON and maps into Python values. JSON and maps beside or inside a union are converted here, because
such a column is read value by value.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.schemas import cells
from quiver.schemas.errors import printable, quoted_name
from quiver.schemas.plain import read_clean_json
from quiver.stages.common.json_rows import bad_source

from .python_rows import CHUNK, to_table

_JSON = pa.json_()
_BAD_VALUES = (ValueError, TypeError, OverflowError, NotImplementedError)


def plain_table(source: str, table: pa.Table) -> pa.Table:
    """Return `table` with plain columns.

    Raises ConfigError, with row and column, for a value that Python cannot hold, such as a date
    after the year 9999.
    """
    columns = {name: _plain_column(source, name, table.column(name)) for name in table.column_names}
    return pa.table(columns)


def _plain_column(source: str, name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    if _holds_union(column.type):
        rows = ({name: cell} for cell in _values(source, name, column))
        return to_table(source, "row", enumerate(rows, 1)).column(name)
    kind = _plain_type(column.type)
    if pa.types.is_dictionary(kind) and any(each.dictionary.null_count for each in column.chunks):
        kind = kind.value_type  # Arrow cannot join dictionaries that hold nulls
    if kind != column.type:
        try:
            column = _rebuilt(kind, _values(source, name, column))
        except pa.ArrowException as error:
            raise bad_source(
                source, f"column {quoted_name(name)} of type {column.type}: {printable(error)}"
            ) from None
    wrapped = cells.wrap(column)
    is_temporal = cells.holds(column.type, pa.types.is_temporal)
    # Read every value now, so that the error for an unreadable one names its row.
    for unread in [column, wrapped] if wrapped is not column else [column] * is_temporal:
        for _ in _values(source, name, unread):
            pass
    return wrapped


def _values(source: str, name: str, column: pa.ChunkedArray) -> Iterator[Any]:
    of_union = _holds_union(column.type)
    for row, scalar in enumerate(column, 1):
        try:
            yield _of_member(scalar) if of_union else _as_written(scalar.as_py(), scalar.type)
        except _BAD_VALUES as error:
            raise bad_source(
                f"{source} row {row}", f"column {quoted_name(name)}: {printable(error)}"
            ) from None


def _holds_union(kind: pa.DataType) -> bool:
    return cells.holds(kind, pa.types.is_union)


def _of_member(scalar: pa.Scalar) -> Any:
    """Return the Python value of a scalar that may contain a union at any depth.

    Only the scalar, not its type, shows which member each value has. Raises ValueError or
    TypeError, like `cells`.
    """
    if isinstance(scalar, pa.UnionScalar):
        return None if scalar.value is None else _of_member(scalar.value)
    if not _holds_union(scalar.type):
        return cells.to_python(_as_written(scalar.as_py(), scalar.type), scalar.type)
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.StructScalar):
        return {name: _of_member(member) for name, member in scalar.items()}
    members = [_of_member(member) for member in scalar.values]
    if isinstance(scalar, pa.MapScalar):
        return cells.to_dict([tuple(entry.values()) for entry in members])
    return members


def _as_written(value: Any, kind: pa.DataType) -> Any:
    """Return `value`, which Arrow's `as_py` gave for the type `kind`, with short floats made exact.

    A short float becomes the shortest decimal that stands for it. Whole numbers stay, because the
    type holds them exactly. Raises ValueError for JSON that cannot be read.
    """
    if isinstance(kind, pa.JsonType) and value is not None:
        read_clean_json(value)
    if isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, cells.Cells):
        kind = kind.storage_type
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        kind = kind.value_type
    if value is None or isinstance(kind, cells.Cells):
        return value
    if _is_short_float(kind):
        short = np.float16 if pa.types.is_float16(kind) else np.float32
        return value if value.is_integer() else float(str(short(value)))
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
    if _is_short_float(kind):
        return pa.float64()
    if isinstance(kind, pa.BaseExtensionType):
        storage = _plain_type(kind.storage_type, json)
        return kind if storage == kind.storage_type else storage
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return pa.large_string() if pa.types.is_string_view(kind) else pa.large_binary()
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        values = _plain_type(kind.value_type, json)
        return kind if pa.types.is_dictionary(kind) and values == kind.value_type else values
    inner = [kind.field(index) for index in range(kind.num_fields)]
    inner = [field.with_type(_plain_type(field.type, json)) for field in inner]
    return _nested_type(kind, inner) if inner else kind


def _is_short_float(kind: pa.DataType) -> bool:
    return pa.types.is_float16(kind) or pa.types.is_float32(kind)


def _nested_type(kind: pa.DataType, inner: list[pa.Field]) -> pa.DataType:
    """Return the nested type `kind` with other member types."""
    if pa.types.is_struct(kind):
        return pa.struct(inner)
    if pa.types.is_map(kind):
        return pa.map_(*inner[0].type, keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(inner[0], kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(inner[0])
    return pa.large_list(inner[0])  # large lists, and views of lists
