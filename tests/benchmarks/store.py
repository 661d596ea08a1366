"""Write and read 200,000 rollouts of 128 + 256 tokens: our store against `datasets`, Parquet and
JSON lines.

    python -m tests.benchmarks.store

Ours writes shards of 256 rows as the generate stage does, each hashed, flushed to disk and checked
against its schema, and checks every hash on reading; the others do none of that. Reading ends when
every completion id was looked at (their sum). JSON lines take a tenth of the rows, times ten. The
files are in the system's cache when they are read.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from .made import RUN, rollouts_table, write_version
from .side_by_side import answer, machine, make_parser, median, table, take_turns

ROWS, PROMPT, COMPLETION = 200_000, 128, 256
SIDES = {
    "store": "Quiver's store",
    "datasets": "datasets, save_to_disk",
    "parquet": "Parquet",
    "jsonl": "JSON lines",
}


def main() -> None:
    """Compare, or write or read in one format."""
    parser = make_parser(__doc__, tuple(SIDES))
    parser.add_argument("--step", choices=("write", "read"))
    arguments = parser.parse_args()
    if arguments.side:
        _side(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        wrote = take_turns("store", list(SIDES), arguments, "--step", "write")
        read = take_turns("store", list(SIDES), arguments, "--step", "read")
    rows = [_row(name, wrote, read) for name in SIDES]
    print(
        machine(),
        f"{_rows(arguments):,} rows, {PROMPT} + {COMPLETION} tokens.",
        table(rows),
        sep="\n\n",
    )


def _row(name: str, wrote: dict[str, list], read: dict[str, list]) -> dict[str, str]:
    into, out = median(wrote[name], "seconds"), median(read[name], "seconds")
    return {
        "": SIDES[name],
        "write s": f"{into:.1f}",
        "times ours": f"{into / median(wrote['store'], 'seconds'):.2f}",
        "read s": f"{out:.2f}",
        "times ours ": f"{out / median(read['store'], 'seconds'):.2f}",
        "on disk MB": f"{median(wrote[name], 'bytes') / 1e6:.0f}",
        "reading, private memory GB": f"{median(read[name], 'private_gb'):.2f}",
    }


def _rows(arguments: argparse.Namespace) -> int:
    return ROWS // 50 if arguments.quick else ROWS


def _side(arguments: argparse.Namespace) -> None:
    import datasets  # noqa: F401  imports are not what is compared
    import pyarrow.parquet  # noqa: F401

    import quiver.stages.core.store.writer  # noqa: F401

    share = 10 if arguments.side == "jsonl" else 1
    path = arguments.work / arguments.side
    write, read = FORMATS[arguments.side]
    if arguments.step == "write":
        shutil.rmtree(path, ignore_errors=True)
        made = rollouts_table(_rows(arguments) // share, PROMPT, COMPLETION)
        seconds, _ = _timed(write, made, path)
        size = sum(
            each.stat().st_size
            for each in ([path] if path.is_file() else path.rglob("*"))
            if each.is_file()
        )
        answer(seconds=seconds * share, bytes=size * share)
    else:
        seconds, total = _timed(read, path)
        lines = Path("/proc/self/status").read_text().splitlines()
        private = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
        answer(seconds=seconds * share, sum=total, private_gb=private / 1e9)


def _timed(function: Callable, *given: Any) -> tuple[float, Any]:
    start = time.monotonic()
    found = function(*given)
    return time.monotonic() - start, found


def _sum(column: pa.ChunkedArray) -> int:
    return sum(pc.sum(chunk.flatten()).as_py() for chunk in column.chunks)


# -- formats


def _write_store(made: pa.Table, path: Path) -> None:
    from quiver.stages.core.store import Store

    write_version(Store(path), "rollouts", "generate", made)


def _read_store(path: Path) -> int:
    from quiver.stages.core.store import Store

    return _sum(Store(path).open(f"{RUN}/rollouts@1").table()["completion_ids"])


def _write_datasets(made: pa.Table, path: Path) -> None:
    from datasets import Dataset

    Dataset(made.replace_schema_metadata(None)).save_to_disk(path)


def _read_datasets(path: Path) -> int:
    from datasets import load_from_disk

    return _sum(load_from_disk(path).data.column("completion_ids"))


def _write_parquet(made: pa.Table, path: Path) -> None:
    pa.parquet.write_table(made, path)


def _read_parquet(path: Path) -> int:
    return _sum(pa.parquet.read_table(path)["completion_ids"])


def _write_jsonl(made: pa.Table, path: Path) -> None:
    with path.open("w") as file:
        for batch in made.to_batches(max_chunksize=1000):
            file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())


def _read_jsonl(path: Path) -> int:
    with path.open() as file:
        return sum(sum(json.loads(line)["completion_ids"]) for line in file)


FORMATS = {
    "store": (_write_store, _read_store),
    "datasets": (_write_datasets, _read_datasets),
    "parquet": (_write_parquet, _read_parquet),
    "jsonl": (_write_jsonl, _read_jsonl),
}


if __name__ == "__main__":
    main()
