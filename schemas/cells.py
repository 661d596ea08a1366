"""An Arrow type for columns whose Python values differ from those that Arrow alone gives.

| in Arrow | in Python |
|---|---|
| JSON text (`arrow.json`, at any depth) | the parsed JSON |
| map, at any depth | a dict |
| struct | a dict with each key of the type; a null is None |

`to_pylist` and `as_py` of such a column give these values everywhere a version is read, also inside
the struct `columns` of prompts. Columns without JSON or maps keep their own type.

    column = json_array([7, 2.5, {"a": None}])     # an Arrow type would make 7 a float
    column.to_pylist()                             # [7, 2.5, {"a": None}]

Not of the spine: to code that reads a column, its values are plain Python values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_CHUNK = 1024
_LISTS = (
    pa.ListType,
    pa.LargeListType,
    pa.FixedSizeListType,
    pa.ListViewType,
    pa.LargeListViewType,
)


class CellScalar(pa.ExtensionScalar):
    """A cell; `as_py` gives its Python value."""

    def as_py(self, **_: Any) -> Any:
        """Return the Python value. Raises ValueError or TypeError if its JSON or map is invalid."""
        return None if self.value is None else to_python(self.value.as_py(), self.type)


class Cells(pa.ExtensionType):
    """An extension type over a column's storage type. Over strings, each cell is JSON text."""

    def __init__(self, storage: pa.DataType) -> None:
        super().__init__(storage, "quiver.cells")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, _: bytes) -> Cells:
        return cls(storage)

    def __arrow_ext_scalar_class__(self) -> type[CellScalar]:
        return CellScalar


_SPECIAL = (Cells, pa.JsonType, pa.MapType)
pa.register_extension_type(Cells(pa.string()))


def fields_of(cells: pa.Table | pa.ChunkedArray) -> dict[str, Any] | None:
    """Return the fields that every cell has, each with its own: {} if no cell is an object, None if
    they differ from cell to cell, as those of JSON, or if all cells are null or blank."""
    if isinstance(cells, pa.Table):
        columns = dict(zip(cells.column_names, cells.columns, strict=True))
        return {name: fields_of(column) for name, column in columns.items()}
    kind = cells.type
    if isinstance(kind, Cells):
        kind = kind.storage_type
        cells = pa.chunked_array([chunk.storage for chunk in cells.chunks], kind)
    if isinstance(kind, pa.DictionaryType):
        kind = kind.value_type
        cells = cells.cast(kind)
    if isinstance(kind, pa.StructType):
        names = [field.name for field in kind]
        return fields_of(pa.table(cells.flatten(), names=names))
    if isinstance(kind, pa.MapType) or cells.null_count == len(cells):
        return None
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        return {}
    texts = pc.utf8_trim_whitespace(cells.drop_null())
    may_be_object = pc.any(pc.starts_with(texts, "{")).as_py()
    return None if may_be_object or pc.all(pc.equal(texts, "")).as_py() else {}


def json_array(cells: Sequence[Any]) -> pa.ChunkedArray:
    """Return the cells as a column of JSON text. NaN and infinity are kept, unlike in strict JSON.

    Raises TypeError or ValueError if JSON cannot hold a cell.
    """
    kind = Cells(pa.string())
    texts = [None if cell is None else json.dumps(cell, ensure_ascii=False) for cell in cells]
    # in short chunks, since an array of strings holds 2 GB at most
    starts = range(0, len(texts), _CHUNK)
    arrays = [pa.array(texts[start : start + _CHUNK], pa.string()) for start in starts]
    return pa.chunked_array([pa.ExtensionArray.from_storage(kind, array) for array in arrays], kind)


def wrap(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return `column` as `Cells` if it holds JSON or maps; else unchanged."""
    kind = column.type
    if not holds(kind, lambda inner: isinstance(inner, pa.JsonType) or pa.types.is_map(inner)):
        return column
    chunks = column.chunks
    if isinstance(kind, pa.JsonType):  # an extension type cannot lie directly over another one
        kind = pa.string()
        chunks = [chunk.storage.cast(kind) for chunk in chunks]
    wrapped = Cells(kind)
    arrays = [pa.ExtensionArray.from_storage(wrapped, chunk) for chunk in chunks]
    return pa.chunked_array(arrays, wrapped)


def without_nulls(column: pa.ChunkedArray) -> list[Any]:
    """Return the cells of `column` without keys that are null in an Arrow struct, at any depth.

    A struct type has the keys of all rows, so a null in it stands for a key that the row does not
    have. Nulls in JSON and in maps were written, and stay.
    """
    kind = column.type
    if isinstance(kind, Cells):
        stored = [cell for chunk in column.chunks for cell in chunk.storage.to_pylist()]
    else:
        stored = column.to_pylist()
        if not holds(kind, pa.types.is_struct):
            return stored
    return [to_python(cell, kind, keep_nulls=False) for cell in stored]


def stored(table: pa.Table) -> pa.Table:
    """Return `table` for libraries that know Arrow's plain types alone: JSON as its text, and maps
    as lists of `key` and `value`. Other columns stay as they are."""
    for at, field in enumerate(table.schema):
        if holds(field.type, lambda kind: isinstance(kind, _SPECIAL)):
            plain = field.with_type(_plain(field.type))
            table = table.set_column(at, plain, table.column(at).cast(plain.type))
    return table


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column of type `kind` in `stored`."""
    if isinstance(kind, Cells | pa.JsonType):
        return _plain(kind.storage_type)
    inner = [kind.field(at) for at in range(kind.num_fields)]
    inner = [field.with_type(_plain(field.type)) for field in inner]
    if isinstance(kind, pa.StructType):
        return pa.struct(inner)
    if isinstance(kind, pa.MapType):
        pair = {"key": _plain(kind.key_type), "value": _plain(kind.item_type)}
        return pa.list_(pa.struct(pair))
    if isinstance(kind, pa.FixedSizeListType):
        return pa.list_(inner[0], kind.list_size)
    if isinstance(kind, _LISTS):
        large = isinstance(kind, pa.LargeListType | pa.LargeListViewType)
        return pa.large_list(inner[0]) if large else pa.list_(inner[0])
    return kind


def holds(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Return True if `kind`, or a type inside it, passes the `test`."""
    inner = [kind.field(at).type for at in range(kind.num_fields)]
    return test(kind) or any(holds(each, test) for each in inner)


def to_python(cell: Any, kind: pa.DataType, *, keep_nulls: bool = True) -> Any:
    """Convert `cell`, the result of Arrow's `as_py` for type `kind`, as described above.

    Raises ValueError or TypeError if its JSON or map is invalid.
    """
    is_json = isinstance(kind, pa.JsonType)
    if isinstance(kind, Cells):
        kind = kind.storage_type
        is_json = pa.types.is_string(kind)
    if cell is None:
        return None
    if is_json:
        return json.loads(cell)
    if pa.types.is_map(kind):
        items = {key: to_python(item, kind.item_type, keep_nulls=keep_nulls) for key, item in cell}
        if len(items) < len(cell):
            raise ValueError("a map has a key twice")
        return items
    if pa.types.is_struct(kind):
        return {
            field.name: to_python(cell[field.name], field.type, keep_nulls=keep_nulls)
            for field in kind
            if keep_nulls or cell[field.name] is not None
        }
    if isinstance(kind, _LISTS):
        return [to_python(item, kind.value_type, keep_nulls=keep_nulls) for item in cell]
    return cell
