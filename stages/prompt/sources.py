"""Rows that a user has, as one Arrow table with its types kept, and a hash of what was read.

| source | read as |
|---|---|
| PATH.jsonl, .json, .csv, .parquet, .arrow, .feather | a file; the hash is that of its bytes |
| datasets:NAME | a hub id, or a folder that `save_to_disk` wrote |
| module:function, file.py:function | a generator of rows (dicts), called with `arguments` |

Bad text (bytes that are not UTF-8, NUL, lone surrogates), broken JSON, keys that stand twice and types that do not agree are
ConfigErrors with file and line; no row is left out in silence. Arrow files are mapped into memory; the others are held as Arrow,
and become Python objects a shard at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from schemas.errors import ConfigError, printable
from stages.common import dotted, files

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".feather")
_CHUNK = 1024


class Source(NamedTuple):
    """All rows of a source. `sha256` is of the file's bytes, or of the rows where there is no file."""

    name: str
    table: pa.Table
    sha256: str


def read(source: str, *, name: str | None = None, split: str = "train", arguments: dict[str, Any] | None = None) -> Source:
    """The rows of `source`. ConfigError says what is wrong, and in which line or row."""
    path = Path(source).expanduser()
    if source.startswith("datasets:"):
        table, sha256 = _from_datasets(source.removeprefix("datasets:"), name, split), ""
    elif path.suffix in SUFFIXES:
        if not path.is_file():
            raise _wrong(source, f"there is no file {path.absolute()}")
        sha256, table = files.sha256(path), _from_file(path)
    elif ":" in source:
        table, sha256 = _from_function(source, arguments or {}), ""
    else:
        raise _wrong(source, f"expected a file ({', '.join(SUFFIXES)}), datasets:NAME, module:function or file.py:function")
    _check(source, table)
    return Source(source, table, sha256 or hash_rows(table))


def hash_rows(table: pa.Table) -> str:
    """sha256 of a table's names, types and values; the same however it is cut into chunks."""
    sink = _Hash()
    whole = table.replace_schema_metadata(None).combine_chunks()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), whole.schema) as writer:
        writer.write_table(whole, max_chunksize=_CHUNK)
    return sink.sha.hexdigest()


class _Hash:
    """A file that keeps nothing but the hash of what is written."""

    closed = False

    def __init__(self) -> None:
        self.sha = hashlib.sha256()

    def write(self, data) -> int:
        self.sha.update(data)
        return len(data)

    def flush(self) -> None:
        pass


def _wrong(where: object, message: str) -> ConfigError:
    return ConfigError(f"source {printable(where)}", message, next="correct the source and run again")


def _check(source: str, table: pa.Table) -> None:
    if not table.num_rows:
        raise _wrong(source, "has no rows")
    twice = sorted({column for column in table.column_names if table.column_names.count(column) > 1})
    if twice:
        raise _wrong(source, f"column {printable(twice[0])} stands more than once")
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise _wrong(source, f"holds bytes that are not what its types say: {printable(error)}") from None


# -- files ------------------------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> pa.Table:
    try:
        if path.suffix == ".csv":
            return _read_csv(path)
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.ParquetFile(path, memory_map=True).read()
        if path.suffix in (".arrow", ".feather"):
            return _read_arrow(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise _wrong(path, f"can not be read: {printable(error)}") from error
    return to_table(str(path), "line", _json_rows(path))


def _read_csv(path: Path) -> pa.Table:
    from pyarrow import csv

    return csv.read_csv(
        path, read_options=csv.ReadOptions(use_threads=False), parse_options=csv.ParseOptions(newlines_in_values=True)
    )


def _read_arrow(path: Path) -> pa.Table:
    mapped = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_stream(mapped).read_all()


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
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
    """Strict JSON: UTF-8, no NaN, no key twice, no NUL and no lone surrogate in any text. ConfigError names `where`."""
    try:
        text = raw.decode("utf-8-sig")
        data = json.loads(text, object_pairs_hook=_no_twice, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise _wrong(where, f"is not UTF-8: byte {error.object[error.start]:#04x} at position {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise _wrong(where, f"is not JSON: {printable(error)}") from None
    if "\\u" in text:
        _require_text(where, data)
    return data


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice")
    return data


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON's")


def _require_text(where: str, value: Any) -> None:
    if isinstance(value, str):
        wrong = bad_text(value)
        if wrong:
            raise _wrong(where, wrong)
    for item in value if isinstance(value, list) else [*value, *value.values()] if isinstance(value, dict) else ():
        _require_text(where, item)


def bad_text(text: str) -> str:
    """What keeps `text` from being a prompt: NUL or a lone surrogate. Empty when nothing does."""
    if "\0" in text:
        return f"has a NUL character in its text, at position {text.index(chr(0))}"
    surrogate = next((c for c in text if "\ud800" <= c <= "\udfff"), None) if not text.isascii() else None
    return f"has a lone surrogate {surrogate!a} in its text, at position {text.index(surrogate)}" if surrogate else ""


# -- rows of Python ---------------------------------------------------------------------------------------------------------


def to_table(source: str, unit: str, rows: Iterable[tuple[int, Any]]) -> pa.Table:
    """Numbered dict rows as a table; a column's type is what all its values agree on (int and float: float)."""
    tables, chunk = [], []
    for number, row in rows:
        if not isinstance(row, dict):
            raise _wrong(f"{source} {unit} {number}", f"expected an object, found {type(row).__name__}")
        chunk.append((number, row))
        if len(chunk) == _CHUNK:
            tables.append(_chunk(source, unit, chunk))
            chunk = []
    tables += [_chunk(source, unit, chunk)] if chunk else []
    if not tables:
        raise _wrong(source, "has no rows")
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise _wrong(source, f"a column's type changes between {unit}s: {printable(error)}") from None


def _chunk(source: str, unit: str, rows: list[tuple[int, dict]]) -> pa.Table:
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    return pa.table({name: _column(source, unit, name, rows) for name in names})


def _column(source: str, unit: str, name: str, rows: list[tuple[int, dict]]) -> pa.Array:
    values = [row.get(name) for _, row in rows]
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, OverflowError, TypeError):
        number, why = _culprit(rows, values)
        raise _wrong(f"{source} {unit} {number}", f"column {printable(name)}: {why}") from None


def _culprit(rows: list[tuple[int, dict]], values: list[Any]) -> tuple[int, str]:
    """The first row whose value does not go with those before it, and why."""
    for end in range(1, len(values) + 1):
        try:
            pa.array(values[:end])
        except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
            return rows[end - 1][0], printable(error)
    raise AssertionError("the values agree")


def _from_function(source: str, arguments: dict[str, Any]) -> pa.Table:
    function, _ = dotted.load(source, "prompt.source")
    try:
        return to_table(source, "row", enumerate(function(**arguments), 1))
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise _wrong(source, f"raised {type(error).__name__}: {printable(error)}") from error


def _from_datasets(source: str, name: str | None, split: str) -> pa.Table:
    import datasets

    folder = Path(source).expanduser()
    try:
        if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(str(folder))
            loaded = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(source, name, split=split)
        return loaded.with_format("arrow")[:]
    except Exception as error:  # the library raises many types; each means that the rows can not be had
        raise _wrong(f"datasets:{source}", f"{type(error).__name__}: {printable(error)}") from error
