"""Read rows of a version by position or by id. A shard is read only when one of its rows is needed,
so a version of a million rows opens at once.

    rows = Shards(store.open("arith/rollouts@3"))
    rows.at([0, 999_999], ["completion_text"])      # a list of dicts; two shards are read
    rows.find(["4be1c0de-sum-0017-2"], [17])        # positions; −1 if there is no such row
    rows.column("finish_reason")                    # of all shards, mapped into memory
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.stages.core.store import Version
from quiver.stages.core.store.versions import schema_module

_AT_ONCE = 256
"""Shards checked and mapped per batch when all are needed."""


class Shards:
    """The rows of one version. Each shard is checked (size, sha256) once, before it is mapped."""

    def __init__(
        self, version: Version, key: str = "rollout_id", most_bytes: int | None = None
    ) -> None:
        """Raises CorruptError if the files do not have as many rows as the version.

        Args:
            most_bytes: If set, only the first shards are used, until they exceed this; the first
                one always counts.
        """
        self.version = version
        self.key = key
        """Column of the ids that `find` looks up."""
        self._entries = [entry for entry in version.manifest.files if entry.rows]
        num_rows = sum(entry.rows for entry in self._entries)
        if num_rows != version.manifest.rows:
            problem = f"its files have {num_rows} rows, the version {version.manifest.rows}"
            raise version.corrupt("manifest.json", problem)
        if most_bytes is not None:
            sizes = np.cumsum([entry.bytes for entry in self._entries])
            num_shards = int(np.searchsorted(sizes, most_bytes, side="right"))
            self._entries = self._entries[: max(num_shards, 1)]
        self._ends = np.cumsum([entry.rows for entry in self._entries], dtype=np.int64)
        self._mapped: dict[int, pa.Table] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(
        self, positions: Sequence[int] | np.ndarray, columns: list[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the rows at `positions`, in this order, as plain values; an empty row for a
        negative position. Raises CorruptError, LineageError."""
        rows: list[dict[str, Any]] = []
        for position in np.asarray(positions, np.int64).tolist():
            if position < 0:
                rows.append({})
                continue
            index = int(np.searchsorted(self._ends, position, side="right"))
            start = int(self._ends[index]) - self._entries[index].rows
            self._map([index])
            row = self._mapped[index].slice(position - start, 1)
            rows += (row.select(columns) if columns else row).to_pylist()
        return rows

    def find(self, ids: Sequence[str], near: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return [ids] int64: the position of each id, −1 if it is missing.

        Args:
            near: For each id a share of the way through the version, in [0, 1), near which its row
                is expected. If any row there has another id, all ids are searched.
        """
        if not ids or not len(self):
            return np.full(len(ids), -1, np.int64)
        guesses = np.minimum(
            (np.asarray(near) * len(self)).round(6).astype(np.int64), len(self) - 1
        )
        at_guesses = [row[self.key] for row in self.at(guesses, [self.key])]
        if at_guesses == list(ids):
            return guesses
        return self.find_all(pa.array(ids, pa.string()))

    def find_all(self, ids: pa.Array | pa.ChunkedArray) -> np.ndarray:
        """Return [ids] int64: the position of each id, −1 if it is missing."""
        mine = self.column(self.key)
        if len(mine) == len(ids) and pc.all(pc.equal(mine, ids)).as_py():
            return np.arange(len(ids))
        places = pc.index_in(ids, value_set=mine.combine_chunks())
        return places.fill_null(-1).to_numpy().astype(np.int64)

    def take(self, places: np.ndarray) -> pa.Table:
        """Return the rows at `places` [rows]; a row of nulls for −1. All rows are not copied."""
        table = self._whole
        if np.array_equal(places, np.arange(len(table))):
            return table
        # on many chunks, `take` would copy the whole table: take from the shards one by one
        needed = np.unique(places[places >= 0])
        parts = [table.slice(0, 0)]
        shard_ends = np.searchsorted(needed, self._ends)
        for mine in filter(len, np.split(needed, shard_ends)):
            stretch = table.slice(mine[0], mine[-1] - mine[0] + 1).combine_chunks()
            parts.append(stretch.take(mine - mine[0]))
        taken = pa.concat_tables(parts).combine_chunks()
        return taken.take(pa.array(np.searchsorted(needed, places), mask=places < 0))

    @cached_property
    def _whole(self) -> pa.Table:
        """All rows, mapped into memory."""
        return self.version.table()

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all shards, mapped into memory. [rows]"""
        for start in range(0, len(self._entries), _AT_ONCE):
            self._map(range(start, min(start + _AT_ONCE, len(self._entries))))
        tables = [self._mapped[index] for index in range(len(self._entries))]
        if not tables:
            return self.version.table([name])[name]
        return pa.chunked_array([chunk for table in tables for chunk in table[name].chunks])

    def _map(self, indices: Iterable[int]) -> None:
        """Check and map the shards that are not mapped yet."""
        missing = [index for index in indices if index not in self._mapped]
        if not missing:
            return
        # a copy of the version with these files alone, so that the ordinary reader checks them
        shards = copy.copy(self.version)
        files = tuple(self._entries[index] for index in missing)
        shards.manifest = self.version.manifest.model_copy(update={"files": files})
        table = shards.table()
        types = dict(zip(table.schema.names, table.schema.types, strict=True))
        for field in schema_of(self.version):
            kind = types.get(field.name)
            # a struct may have any fields, and a number may be a list with one entry per token
            is_struct = pa.types.is_struct(field.type) and kind and pa.types.is_struct(kind)
            if not is_struct and kind not in (field.type, pa.list_(field.type)):
                problem = f"its column {field.name} is missing, or not {field.type}"
                raise self.version.corrupt(files[0].name, problem)
        start = 0
        for index in missing:
            num_rows = self._entries[index].rows
            self._mapped[index] = table.slice(start, num_rows)
            start += num_rows


def schema_of(version: Version) -> pa.Schema:
    """Return the columns that a version has by its kind."""
    return schema_module(version.ref.kind).SCHEMAS[version.manifest.kind_schema]
