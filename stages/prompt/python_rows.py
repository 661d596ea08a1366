"""Python rows as an Arrow table: strict JSON, and types that all rows agree on. What is wrong is
named by file and line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import no_key_twice
from quiver.stages.common.chat.template import bad_text

CHUNK = 1024


def wrong(where: object, message: str) -> ConfigError:
    """The error for a source, or a line or row of it."""
    return ConfigError(
        f"source {printable(where)}", message, next="correct the source and run again"
    )


def json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, row): of JSON lines, or of one array of objects (then `line` counts its items)."""
    with open(path, "rb") as file:
        if file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
            rows = parse(f"{path}", path.read_bytes())
            yield from enumerate(rows, 1)
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse(f"{path} line {number}", line)


def parse(where: str, raw: bytes) -> Any:
    """Strict JSON: UTF-8, no NaN, no key twice, no NUL and no lone surrogate in any text.
    ConfigError names `where`."""
    try:
        text = raw.decode("utf-8-sig")
        data = json.loads(text, object_pairs_hook=no_key_twice, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise wrong(
            where, f"is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise wrong(where, f"is not JSON: {printable(error)}") from None
    try:
        if "\\u" in text:
            _require_text(where, data)
    except RecursionError:
        raise wrong(where, "is nested too deeply") from None
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")


def _require_text(where: str, value: Any) -> None:
    if isinstance(value, str):
        why = bad_text(value)
        if why:
            raise wrong(where, why)
    for item in (
        value
        if isinstance(value, list)
        else [*value, *value.values()]
        if isinstance(value, dict)
        else ()
    ):
        _require_text(where, item)


def to_table(source: str, unit: str, rows: Iterable[tuple[int, Any]]) -> pa.Table:
    """Numbered dict rows as a table; a column's type is what all its values agree on (int and
    float: float)."""
    tables: list[pa.Table] = []
    schema = pa.schema([])
    rows = iter(rows)
    while chunk := list(islice(rows, CHUNK)):
        for number, row in chunk:
            if not isinstance(row, dict):
                raise wrong(
                    f"{source} {unit} {number}", f"expected an object, found {type(row).__name__}"
                )
        tables.append(_chunk(source, unit, chunk))
        try:
            schema = pa.unify_schemas([schema, tables[-1].schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            where = f"{source} {unit} {chunk[0][0]} to {chunk[-1][0]}"
            raise wrong(
                where, f"a column has another type than before: {printable(error)}"
            ) from None
    if not tables:
        raise wrong(source, "has no rows")
    return pa.concat_tables(tables, promote_options="permissive")


def _chunk(source: str, unit: str, rows: list[tuple[int, dict]]) -> pa.Table:
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    return pa.table({name: _column(source, unit, name, rows) for name in names})


def _column(source: str, unit: str, name: str, rows: list[tuple[int, dict]]) -> pa.Array:
    values = [row.get(name) for _, row in rows]
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        number, why = _culprit(rows, values)
        raise wrong(f"{source} {unit} {number}", f"column {printable(name)}: {why}") from None


def _culprit(rows: list[tuple[int, dict]], values: list[Any]) -> tuple[int, str]:
    """The first row whose value does not go with those before it, and why."""
    for end in range(1, len(values) + 1):
        try:
            pa.array(values[:end])
        except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
            return rows[end - 1][0], printable(error)
    raise AssertionError("the values agree")
