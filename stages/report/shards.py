"""Rows of a version by position or by id, its shards read only when a row of theirs is needed, so
that a version of a million rows opens at once.

    rows = Shards(store.open("arith/rollouts@3"))
    rows.at([0, 999_999], ["completion_text"])      # a list of dicts; two shards are read
    rows.find(["4be1c0de-sum-0017-2"], [17])        # positions; −1 where there is no such row
    rows.column("finish_reason")                    # of all shards, mapped into memory
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.stages.common.store import Version
from quiver.stages.common.store.versions import schema_module

_AT_ONCE = 256
"""Shards that are checked and mapped in one go where all are needed."""


class Shards:
    """The rows of one version. Each shard is checked (size, sha256) once, before it is mapped."""

    def __init__(self, version: Version, key: str = "rollout_id") -> None:
        """Raises CorruptError where the files do not have as many rows as the version."""
        self.version = version
        self.key = key
        """The column of the ids by which `find` looks."""
        self._entries = [entry for entry in version.manifest.files if entry.rows]
        self._ends = np.cumsum([entry.rows for entry in self._entries], dtype=np.int64)
        self._mapped: dict[int, pa.Table] = {}
        if len(self) != version.manifest.rows:
            problem = f"its files have {len(self)} rows, the version {version.manifest.rows}"
            raise version.corrupt("manifest.json", problem)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def at(
        self, positions: Sequence[int] | np.ndarray, columns: list[str] | None = None
    ) -> list[dict[str, Any]]:
        """The rows at `positions` in this order, as plain values; an empty one for a negative
        position. CorruptError, LineageError."""
        rows: list[dict[str, Any]] = []
        for position in np.asarray(positions, np.int64).tolist():
            if position < 0:
                rows.append({})
                continue
            index = int(np.searchsorted(self._ends, position, side="right"))
            start = int(self._ends[index]) - self._entries[index].rows
            shard = self._shard(index)
            row = shard.select(columns) if columns else shard
            rows += row.slice(position - start, 1).to_pylist()
        return rows

    def find(self, ids: Sequence[str], near: Sequence[float] | np.ndarray) -> np.ndarray:
        """[ids] int64: where each id stands; −1 where it does not.

        `near`: for each a share of the way through the version, in [0, 1), at which the row may
        stand. A row there counts only if it bears the id; otherwise all ids are looked through.
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
        """[ids] int64: where each id stands; −1 where it does not."""
        mine = self.column(self.key)
        if len(mine) == len(ids) and pc.all(pc.equal(mine, ids)).as_py():
            return np.arange(len(ids))
        places = pc.index_in(ids, value_set=mine.combine_chunks())
        return places.fill_null(-1).to_numpy().astype(np.int64)

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of all shards, mapped into memory. [rows]"""
        for start in range(0, len(self._entries), _AT_ONCE):
            self._map(range(start, min(start + _AT_ONCE, len(self._entries))))
        tables = [self._mapped[index] for index in range(len(self._entries))]
        if not tables:
            return self.version.table([name])[name]
        return pa.chunked_array([chunk for table in tables for chunk in table[name].chunks])

    def _shard(self, index: int) -> pa.Table:
        self._map([index])
        return self._mapped[index]

    def _map(self, indices: Iterable[int]) -> None:
        """Check and map these shards, as far as that is not done."""
        missing = [index for index in indices if index not in self._mapped]
        if not missing:
            return
        # the same version with these files alone: they are read as those of every other
        part = copy.copy(self.version)
        files = tuple(self._entries[index] for index in missing)
        part.manifest = self.version.manifest.model_copy(update={"files": files})
        table = part.table()
        for field in schema_module(self.version.ref.kind).SCHEMAS[part.manifest.kind_schema]:
            if not _is_of(field, table.schema):
                problem = f"its column {field.name} is missing, or not {field.type}"
                raise self.version.corrupt(files[0].name, problem)
        start = 0
        for index in missing:
            num_rows = self._entries[index].rows
            self._mapped[index] = table.slice(start, num_rows)
            start += num_rows


def columns_of(version: Version) -> list[str]:
    """The columns that a version has by its schema."""
    return schema_module(version.ref.kind).SCHEMAS[version.manifest.kind_schema].names


def _is_of(field: pa.Field, schema: pa.Schema) -> bool:
    """Whether a file of this schema has the column as its kind has it: a struct may have any
    fields, and what is a number may be a list with one a token."""
    index = schema.get_field_index(field.name)
    if index < 0:
        return False
    kind = schema.field(index).type
    if pa.types.is_struct(field.type):
        return pa.types.is_struct(kind)
    return kind == field.type or kind == pa.list_(field.type)
