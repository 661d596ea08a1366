"""Python rows as an Arrow table, with types that all rows agree on. What is wrong is named by file
and line."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import printable
from quiver.stages.common.json_rows import bad_source

CHUNK = 1024
_DISAGREEMENTS = (pa.ArrowException, ValueError, OverflowError, TypeError)


def to_table(source: str, unit: str, rows: Iterable[tuple[int, Any]]) -> pa.Table:
    """Numbered dict rows as a table; a column's type is what all its values agree on (int and
    float: float)."""
    tables: list[pa.Table] = []
    schema = pa.schema([])
    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        for number, row in chunk:
            if not isinstance(row, dict):
                raise bad_source(
                    f"{source} {unit} {number}", f"expected an object, found {type(row).__name__}"
                )
        names = dict.fromkeys(name for _, row in chunk for name in row)
        table = pa.table({name: _column(source, unit, name, chunk) for name in names})
        try:
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise bad_source(
                f"{source} {unit} {chunk[0][0]} to {chunk[-1][0]}",
                f"a column has another type than before: {printable(error)}",
            ) from None
        tables.append(table)
    if not tables:
        raise bad_source(source, "has no rows")
    return pa.concat_tables(tables, promote_options="permissive")


def _column(source: str, unit: str, name: str, rows: list[tuple[int, dict]]) -> pa.Array:
    cells = [row.get(name) for _, row in rows]
    try:
        return pa.array(cells)
    except _DISAGREEMENTS:
        pass
    for end, (number, _) in enumerate(rows, 1):
        try:
            pa.array(cells[:end])
        except _DISAGREEMENTS as error:  # the first row that does not go with those before it
            raise bad_source(
                f"{source} {unit} {number}", f"column {printable(name)}: {printable(error)}"
            ) from None
    raise AssertionError("the cells agree")
