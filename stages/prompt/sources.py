"""Read a user's rows as one Arrow table with their types, and hash the bytes that were read.

| source | read as |
|---|---|
| PATH.jsonl, .json, .csv, .parquet, .arrow, .feather | a file; the hash is of its bytes |
| datasets:NAME, datasets:PATH | a hub id, or a folder that `save_to_disk` wrote |
| module:function, file.py:function | a generator of rows (dicts), called with `arguments` |

A cell has the Python value that its file says:

* JSON, and rows of a generator: the value from `json.loads` or the generator (`columns.py`).
* CSV: text, or numbers in a column that holds nothing else (`stages/core/file_rows.py`). In the
  column of prompts, numbers are asked as their text.
* Parquet, Arrow, Feather, `datasets`: the value from Arrow's `to_pylist`. A map is a dict, the JSON
  of `datasets.Json` is parsed, and a float of 16 or 32 bits is its shortest decimal. A struct has
  all keys of its type, null ones too: Arrow does not store which keys its row had. Such keys are
  left out only in chats, tools and template arguments.

Bytes that are not UTF-8, broken JSON, duplicate keys and values that cannot be kept are
ConfigErrors with file and line; no row is skipped silently. So are NUL and lone surrogates in JSON
and CSV; other text is checked for NUL only if it becomes a prompt. Arrow files are memory-mapped.
The others are held as Arrow, and become Python objects one shard at a time.

Planning needs only hash and columns (`hash_and_columns`). For a file, and for a folder that
`save_to_disk` wrote, they are remembered until a file changes (`stages/core/user_cache.py`).
Generators, hub ids and sources with media are read each time, and so are rows for a new version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pyarrow as pa

from quiver.schemas.cells import holds
from quiver.schemas.errors import ConfigError, did_you_mean, printable, quoted_name, reason
from quiver.schemas.plain import read_json
from quiver.schemas.prompts import MEDIA
from quiver.stages.core import plugins
from quiver.stages.core.config import parse
from quiver.stages.core.file_rows import bad_source, csv_rows, json_rows
from quiver.stages.core.files import sha256_of
from quiver.stages.core.user_cache import Memory

from .columns import CHUNK, plain_table, to_table
from .config import INPUTS, SUFFIXES, Config, SourceConfig
from .media import hash_with_files

_MOST_LEVELS = 60  # Arrow can read files with up to 64
_QUESTIONS = ("question", "prompt", "problem", "query", "instruction")
"""Usual names of columns with a question, the most common first."""
_OF_FILES = re.compile(r"\.(jsonl?|csv|tsv|txt|parquet|arrow|feather|py|gz|zip|zst|bz2|xz)$", re.I)
_AROUND_ROWS = ("data", "rows", "examples", "train")
"""Usual names of the list of all rows in an object around it."""


class Source(NamedTuple):
    """All rows of a source.

    `sha256` is the hash of the file's bytes, or of the rows if there is no file; the pictures'
    files are included.
    """

    table: pa.Table
    sha256: str


def hash_and_columns(config: SourceConfig) -> tuple[str, list[str]]:
    """Return the source's hash and columns. Reads it if they are not remembered. Raises
    ConfigError."""
    kept = _memory(config).recall()
    if kept is not None:
        return kept["sha256"], kept["columns"]
    source = read(config)
    return source.sha256, source.table.column_names


def read(config: SourceConfig) -> Source:
    """Read the rows of `config.source`. Raises ConfigError, which names the line or row."""
    memory = _memory(config)
    source = config.source
    path = Path(os.path.expanduser(source))
    sha256 = ""
    if source.startswith("datasets:"):
        table = _read_dataset(config)
    elif path.suffix in SUFFIXES and "://" not in source:
        if not path.is_file():
            raise bad_source(source, f"there is no file {path.absolute()}{_hint(source)}")
        sha256 = sha256_of(path)
        table = _read_file(path)
    elif ":" in source and "://" not in source:
        function, _ = plugins.load(source, "data.source")
        try:
            rows = enumerate(function(**config.arguments), 1)
            table = to_table(source, ((f"row {number}", row) for number, row in rows))
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything
            problem = f"raised {type(error).__name__}: {printable(error)}"
            raise bad_source(source, problem) from error
    else:
        raise bad_source(
            source,
            f"expected a file ({', '.join(SUFFIXES)}, in lower case and unpacked), datasets:NAME, "
            "datasets:PATH (a folder that save_to_disk wrote), module:function or file.py:function"
            f"{_hint(source)}",
        )
    _check(source, table)
    table = plain_table(source, table)
    sha256 = sha256 or hash_rows(table)
    if config.media:
        sha256 = hash_with_files(table, config, sha256)
    memory.keep({"sha256": sha256, "columns": table.column_names})
    return Source(table, sha256)


def _hint(source: str) -> str:
    """Return what a source that is not there may mean, at the end of an error."""
    of_hub = re.match(r"(?:hf://datasets/)?([\w.-]+/[\w.-]+)", source)
    is_name = of_hub and of_hub[0] == source and not _OF_FILES.search(source)
    if of_hub and (source.startswith("hf:") or (is_name and not Path(source).parent.exists())):
        return f"; did you mean datasets:{of_hub[1]}?"
    if "://" in source:
        return "; addresses are not read: copy the file to this machine, or write a generator"
    if any(mark in source for mark in "*?["):
        return "; only one file is read: join the files, or write a generator that reads them"
    return ""


def _memory(config: SourceConfig) -> Memory:
    """Return the memory of `config.source`. It stays empty unless files alone decide the rows."""
    is_folder = config.source.startswith("datasets:")
    path = Path(os.path.expanduser(config.source.removeprefix("datasets:"))).absolute()
    files = [path] if path.suffix in SUFFIXES and not is_folder else []
    if is_folder:
        # a DatasetDict has one folder for each split; without state.json it is a hub id
        folder = path if os.path.isfile(path / "state.json") else path / config.split
        with suppress(OSError, ValueError, TypeError, KeyError):
            state = read_json((folder / "state.json").read_bytes())
            names = ["state.json", "dataset_info.json"]
            names += [file["filename"] for file in state["_data_files"]]
            files = [folder / name for name in names]
            files += [path / "dataset_dict.json"] if folder != path else []
    if config.media or not all(map(os.path.isfile, files)):
        files = []
    key = json.dumps([str(path), config.split])
    # the hash of rows also follows from the code that reads them
    code = [sha256_of(Path(__file__).with_name(name)) for name in ("sources.py", "columns.py")]
    return Memory("sources", key, files, [*code, version("pyarrow"), version("datasets")])


def fill_in(config: Config, sha256: str, columns: list[str]) -> Config:
    """Return `config` with the source's hash and input column.

    Raises ConfigError if source and config do not match.
    """
    if config.source_sha256 not in ("", sha256):
        raise ConfigError(
            f"data.source {printable(config.source)}",
            f"sha256 expected {config.source_sha256[:12]}…, found {sha256[:12]}…",
            next="restore the source as it was when the run began, or begin a new run; if the "
            "recipe names data.source_sha256, correct it",
        )
    column_list = printable(", ".join(map(quoted_name, columns)))
    inputs = ("prompt",) if config.raw_text else INPUTS
    input_name = config.input or next((name for name in inputs if name in columns), None)
    column = (input_name and getattr(config, input_name)) or input_name
    by_name = {name.strip().lower(): name for name in columns}
    likely = [by_name[name] for name in _QUESTIONS if name in by_name]
    hint = f'; did you mean data.prompt = "{printable(likely[0])}"?' if likely else ""
    around = next((name for name in _AROUND_ROWS if name in columns), None)
    is_json = config.source.endswith((".json", ".jsonl"))
    is_near = bool(column) and get_close_matches(column, columns, cutoff=0.8)
    is_named = input_name == "prompt_ids" or column in columns or is_near
    if around and is_json and not likely and not is_named:
        raise ConfigError(
            f"source {printable(config.source)}",
            f"has only {column_list}, and no column of questions",
            next=f"if the rows are in {around}, write that list alone, as an array of objects; if "
            "not, name a column in data.prompt",
        )
    if input_name is None:
        keys = " or ".join(f"data.{name}" for name in inputs)
        raise ConfigError(
            f"source {printable(config.source)}",
            f"has no column {' or '.join(inputs)}; it has {column_list}{hint}",
            next=f"set {keys} to one of them",
        )
    named = {
        input_name: column,
        "group_id": config.group_id,
        **{MEDIA[modality]: column for modality, column in config.media.items()},
        "tools": config.tools if config.tools not in ("", "tools") else None,
    }
    for field, name in named.items():
        if name is not None and name not in columns:
            raise ConfigError(
                f"data.{field} {quoted_name(name)}",
                f"{printable(config.source)} has no such column; it has {column_list}"
                f"{did_you_mean(name, columns, hint if field == input_name else '')}",
                next=f"set data.{field} to one of them",
            )
    filled_in = {input_name: column, "source_sha256": sha256}
    return parse(type(config), {**dict(config), **filled_in}, "data")


def hash_rows(table: pa.Table) -> str:
    """Return the sha256 of a table's names, types and values; it does not depend on the chunks."""
    table = table.replace_schema_metadata(None).combine_chunks()
    sha256 = hashlib.sha256()
    sink = SimpleNamespace(write=sha256.update, closed=False)
    with pa.ipc.new_stream(pa.PythonFile(sink, "w"), table.schema) as writer:
        writer.write_table(table, max_chunksize=CHUNK)
    return sha256.hexdigest()


def _check(source: str, table: pa.Table) -> None:
    if not table.num_rows:
        raise bad_source(source, "has no rows")
    names = table.column_names
    for name in sorted(names):
        if names.count(name) > 1:
            raise bad_source(source, f"column {quoted_name(name)} occurs more than once")
    for field in table.schema:
        if _is_deeper(field.type, _MOST_LEVELS):
            raise bad_source(
                source,
                f"column {quoted_name(field.name)} is nested more than {_MOST_LEVELS} levels deep",
            )
        if holds(field.type, lambda kind: pa.types.is_interval(kind) or pa.types.is_union(kind)):
            raise bad_source(
                source,
                f"column {quoted_name(field.name)} is of the type {field.type}, which rewards "
                "cannot be given: write its values as JSON, numbers or text",
            )
    try:
        table.validate(full=True)
    except pa.ArrowInvalid as error:
        raise bad_source(
            source, f"holds bytes that do not match its types: {printable(error)}"
        ) from None


def _is_deeper(kind: pa.DataType, levels: int) -> bool:
    fields = (kind.field(index) for index in range(kind.num_fields))
    return levels == 0 or any(_is_deeper(field.type, levels - 1) for field in fields)


# -- by kind of source


def _read_file(path: Path) -> pa.Table:
    try:
        if path.suffix == ".csv":
            return to_table(str(path), csv_rows(path))
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.ParquetFile(path, memory_map=True).read()
        if path.suffix in (".arrow", ".feather"):
            mapped = pa.memory_map(str(path))
            try:
                return pa.ipc.open_file(mapped).read_all()
            except pa.ArrowInvalid:
                mapped.seek(0)
                return pa.ipc.open_stream(mapped).read_all()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise bad_source(path, f"cannot be read: {reason(error)}") from error
    return to_table(str(path), json_rows(path))


def _read_dataset(config: SourceConfig) -> pa.Table:
    import datasets

    name = config.source.removeprefix("datasets:")
    folder = Path(os.path.expanduser(name))
    try:
        if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            dataset = datasets.load_from_disk(str(folder))
            splits = dataset
            if not isinstance(dataset, datasets.DatasetDict):
                splits = {"train": dataset, str(dataset.split): dataset}
            if config.split not in splits:
                raise ConfigError(
                    f"data.split {printable(config.split)}",
                    f"{printable(config.source)} has the splits {printable(', '.join(splits))}",
                    next="set data.split to one of them",
                )
            dataset = splits[config.split]
        else:
            dataset = datasets.load_dataset(name, config.name, split=config.split)
        return dataset.with_format("arrow")[:]
    except ConfigError:
        raise
    except Exception as error:  # the library raises many types; each means that there are no rows
        raise bad_source(config.source, f"{type(error).__name__}: {printable(error)}") from error
