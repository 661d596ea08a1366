"""Write Arrow tables as JSON lines, column by column: Arrow itself only reads this format.

    to_lines(pa.table({"ids": [[1, 2], [3]], "text": ["a", None]}))
    # b'{"ids":[1,2],"text":"a"}\n{"ids":[3]}\n'

Members that are null are left out, at any depth below a struct. A number that is not finite is
null, and a decimal is a number. Dates, UUIDs and all else that JSON does not know are their text.
JSON cannot hold bytes: TypeError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
"""How JSON writes these characters; the backslash comes first."""
_OTHER_CONTROLS = r"[\x00-\x08\x0b\x0c\x0e-\x1f]"
_MOST_BYTES = 2**26
"""Bytes of the rows that become text together: the text of a column must stay below 2 GiB."""


def to_lines(table: pa.Table) -> bytes:
    """Return a table as one JSON object per row, in UTF-8."""
    if table.nbytes > _MOST_BYTES and len(table) > 1:
        half = len(table) // 2
        return to_lines(table.slice(0, half)) + to_lines(table.slice(half))
    rows = table.combine_chunks().to_struct_array()
    return b"".join(_lines(json_texts(chunk)) for chunk in rows.chunks)


def _lines(texts: pa.Array) -> bytes:
    """Return texts as lines, without a Python string for each."""
    (joined,) = pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), "\n")
    return b"%s\n" % joined.as_buffer()


def json_texts(column: pa.Array) -> pa.Array:
    """Return [rows] string: each cell as JSON text; null stays null, and so does no finite
    number."""
    if pa.types.is_large_string(column.type):
        column = column.cast(pa.string())
    elif pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    kind = column.type
    if isinstance(kind, pa.JsonType):
        return column.storage
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        texts = column.cast(pa.string())
        if pa.types.is_floating(kind):  # Arrow writes 1.0 as 1, which readers take for an integer
            texts = pc.replace_substring_regex(texts, r"^(-?[0-9]+)$", r"\1.0")
        is_finite = pc.is_finite(column)
        return texts if pc.all(is_finite).as_py() else pc.if_else(is_finite, texts, None)
    if pa.types.is_list(kind):
        lists = lists_like(column, json_texts(column.flatten()).fill_null("null"))
        return pc.binary_join_element_wise("[", pc.binary_join(lists, ","), "]", "")
    if pa.types.is_struct(kind) and kind.num_fields:
        members = [
            pc.binary_join_element_wise(f",{json.dumps(field.name)}:", json_texts(cells), "")
            for field, cells in zip(kind, column.flatten(), strict=True)
        ]
        # not null_handling="skip": pyarrow 26 drops a row that has only nulls
        text = pc.binary_join_element_wise(
            *members, "", null_handling="replace", null_replacement=""
        )
        without_comma = pc.binary_replace_slice(text, start=0, stop=1, replacement="")
        texts = pc.binary_join_element_wise("{", without_comma, "}", "")
        return pc.if_else(column.is_valid(), texts, None) if column.null_count else texts
    if pa.types.is_string(kind):
        has_controls = pc.match_substring_regex(column, _OTHER_CONTROLS)
        if not pc.any(has_controls).as_py():
            for character, escape in _ESCAPES.items():
                column = pc.replace_substring(column, character, escape)
            return pc.binary_join_element_wise('"', column, '"', "")
    texts = [None if cell is None else json_text(cell) for cell in column.to_pylist()]
    return pa.array(texts, pa.string())


def json_text(cell: Any) -> str:
    """Return a Python value as JSON text. Raises TypeError for bytes."""
    return json.dumps(_plain(cell), ensure_ascii=False)


def _plain(cell: Any) -> Any:
    if isinstance(cell, Mapping):
        return {name: _plain(member) for name, member in cell.items()}
    if isinstance(cell, list | tuple):
        return [_plain(member) for member in cell]
    if isinstance(cell, Decimal):
        cell = float(cell)
    if isinstance(cell, float) and not math.isfinite(cell):
        return None
    return cell if cell is None or isinstance(cell, str | int | float | bytes) else str(cell)


def lists_like(column: pa.ListArray, values: pa.Array) -> pa.ListArray:
    """Return lists of the same lengths, and null where `column` is, with other values."""
    ends = pc.cumulative_sum(pc.list_value_length(column).fill_null(0))
    offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
    return pa.ListArray.from_arrays(offsets, values, mask=column.is_null())
