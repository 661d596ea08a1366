"""Rows that a user has, as one Arrow table with its types kept, and a hash of what was read.

| source | read as |
|---|---|
| PATH.jsonl, .json, .csv, .parquet, .arrow, .feather | a file; the hash is that of its bytes |
| datasets:NAME | a hub id, or a folder that `save_to_disk` wrote |
| module:function, file.py:function | a generator of rows (dicts), called with `arguments` |

Bad text (bytes that are not UTF-8, NUL, lone surrogates), broken JSON, keys that stand twice and
types that do not agree are ConfigErrors with file and line; no row is left out in silence. Arrow
files are mapped into memory; the others are held as Arrow, and become Python objects a shard at a
time.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common import plugins as dotted
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import without_folder
from quiver.stages.common.store import storage

from .python_rows import CHUNK, json_rows, to_table, wrong

_DEPTH = 60  # Arrow files are read to 64 levels
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".feather")
INPUTS = ("messages", "prompt", "prompt_ids")


class SourceConfig(Base):
    """Rows: where they come from, and which columns matter."""

    source: str = Field(min_length=1)
    """A .jsonl, .json, .csv, .parquet, .arrow or .feather file; `datasets:NAME`; or a generator of
    rows, `module:function` or `file.py:function`."""
    split: str = "train"
    """Which split of `datasets:NAME`."""
    name: str | None = None
    """Which configuration of `datasets:NAME`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a generator."""
    messages: str | None = None
    """Column with a chat: a list of {role, content}. Where neither this, `prompt` nor `prompt_ids`
    is set, the first of the columns messages, prompt, prompt_ids that the source has is taken."""
    prompt: str | None = None
    """Column with plain text; it becomes one user message, unless `raw_text`."""
    prompt_ids: str | None = None
    """Column with token ids, given to the engine as they are."""
    raw_text: bool = False
    """Take the text of `prompt` as the whole prompt, without a chat template. Control tokens typed
    in it stay text."""
    group_id: str | None = None
    """Column with unique names. None: the row's number in the source, from 0, with at least six
    digits."""
    group_prefix: str = ""
    """Put before every group id."""
    limit: int | None = Field(default=None, ge=1)
    """Rows an iteration. Each iteration takes the next ones of a shuffle that is drawn anew every
    epoch. None: all, in order."""
    source_sha256: str = ""
    """Filled in by the stage: hash of the file, or of the rows where there is no file. If set, the
    source must have it."""

    def key(self) -> dict[str, Any]:
        """The bytes decide, wherever they lie, once their hash is known."""
        return {
            **super().key(),
            **({"source": without_folder(self.source)} if self.source_sha256 else {}),
        }

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        given = [name for name in INPUTS if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other: name one column")
        if self.raw_text and (self.messages or self.prompt_ids):
            raise ValueError(f"raw_text goes with prompt, not with {given[0]}")
        return self


class Source(NamedTuple):
    """All rows of a source. `sha256` is of the file's bytes, or of the rows where there is no
    file."""

    name: str
    table: pa.Table
    sha256: str


def read(config: SourceConfig) -> Source:
    """The rows of `config.source`. ConfigError says what is wrong, and in which line or row."""
    source = config.source
    path = Path(source).expanduser()
    if source.startswith("datasets:"):
        table, sha256 = (
            _from_datasets(source.removeprefix("datasets:"), config.name, config.split),
            "",
        )
    elif path.suffix in SUFFIXES:
        if not path.is_file():
            raise wrong(source, f"there is no file {path.absolute()}")
        sha256, table = storage.sha256(path), _from_file(path)
    elif ":" in source:
        table, sha256 = _from_function(source, config.arguments), ""
    else:
        raise wrong(
            source,
            f"expected a file ({', '.join(SUFFIXES)}), datasets:NAME, module:function or "
            "file.py:function",
        )
    _check(source, table)
    return Source(source, table, sha256 or hash_rows(table))


def hash_rows(table: pa.Table) -> str:
    """sha256 of a table's names, types and values; the same however it is cut into chunks."""
    sink = _Hash()
    whole = table.replace_schema_metadata(None).combine_chunks()
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), whole.schema) as writer:
        writer.write_table(whole, max_chunksize=CHUNK)
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


def _check(source: str, table: pa.Table) -> None:
    if not table.num_rows:
        raise wrong(source, "has no rows")
    twice = sorted(
        {column for column in table.column_names if table.column_names.count(column) > 1}
    )
    if twice:
        raise wrong(source, f"column {printable(twice[0])} stands more than once")
    deep = next((field.name for field in table.schema if _is_deeper(field.type, _DEPTH)), None)
    if deep is not None:
        raise wrong(source, f"column {printable(deep)} is nested more than {_DEPTH} levels deep")
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise wrong(
            source, f"holds bytes that are not what its types say: {printable(error)}"
        ) from None


def _is_deeper(kind: pa.DataType, levels: int) -> bool:
    return levels == 0 or any(
        _is_deeper(kind.field(at).type, levels - 1) for at in range(kind.num_fields)
    )


# -- files


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
        raise wrong(path, f"can not be read: {printable(error)}") from error
    return to_table(str(path), "line", json_rows(path))


def _read_csv(path: Path) -> pa.Table:
    from pyarrow import csv

    table = csv.read_csv(
        path,
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(newlines_in_values=True),
    )
    for field in table.schema:
        if pa.types.is_binary(field.type):  # what Arrow makes of bytes that are no text
            for row, value in enumerate(table.column(field.name).to_pylist(), 1):
                try:
                    (value or b"").decode()
                except UnicodeDecodeError:
                    raise wrong(
                        f"{path} row {row}", f"column {printable(field.name)} is not UTF-8"
                    ) from None
    return table


def _read_arrow(path: Path) -> pa.Table:
    mapped = pa.memory_map(str(path))
    try:
        return pa.ipc.open_file(mapped).read_all()
    except pa.ArrowInvalid:
        mapped.seek(0)
        return pa.ipc.open_stream(mapped).read_all()


def _from_function(source: str, arguments: dict[str, Any]) -> pa.Table:
    function, _ = dotted.load(source, "prompt.source")
    try:
        return to_table(source, "row", enumerate(function(**arguments), 1))
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise wrong(source, f"raised {type(error).__name__}: {printable(error)}") from error


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
    except (
        Exception
    ) as error:  # the library raises many types; each means that the rows can not be had
        raise wrong(f"datasets:{source}", f"{type(error).__name__}: {printable(error)}") from error
