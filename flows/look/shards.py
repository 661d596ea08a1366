"""Read rows of a version by position or by id. A shard is read only when one of its rows is needed,
so a version of a million rows opens at once.

    rows = Shards(store.open("arith/rollouts@3"))
    rows.at([0, 999_999], ["completion_text"])      # a list of dicts; two shards are read
    rows.take(np.array([17, -1]))                   # a table; its second row is null
    rows.column("finish_reason")                    # of all shards, mapped into memory
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.stages.core.store import Version
from quiver.stages.core.store.versions import schema_module

_AT_ONCE = 256
"""Shards checked and mapped per batch."""


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
        """Column of the ids by which rollouts find their partners here."""
        self._entries = version.manifest.files
        num_rows = sum(entry.rows for entry in self._entries)
        if num_rows != version.manifest.rows or not self._entries:
            problem = f"its files have {num_rows} rows, the version {version.manifest.rows}"
            raise version.corrupt("manifest.json", problem)
        if most_bytes is not None:
            sizes = np.cumsum([entry.bytes for entry in self._entries])
            num_shards = int(np.searchsorted(sizes, most_bytes, side="right"))
            self._entries = self._entries[: max(num_shards, 1)]
        self._ends = np.cumsum([entry.rows for entry in self._entries], dtype=np.int64)
        self._mapped: dict[int, pa.Table] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def schema(self) -> pa.Schema:
        """The columns, with the types that they have in this version."""
        return self._map([0])[0].schema

    def at(
        self, positions: Sequence[int] | np.ndarray, columns: list[str] | None = None
    ) -> list[dict[str, Any]]:
        """Return the rows at `positions`, in this order, as plain values; an empty row for a
        negative position. Raises CorruptError, LineageError."""
        positions = np.asarray(positions, np.int64)
        rows = self.take(positions, columns).to_pylist()
        return [row if position >= 0 else {} for row, position in zip(rows, positions, strict=True)]

    def take(self, positions: np.ndarray, columns: list[str] | None = None) -> pa.Table:
        """Return the rows at `positions` [rows]; a row of nulls for −1.

        Only the shards that have these rows are read. All rows in order are not copied.
        """
        if np.array_equal(positions, np.arange(len(self))):
            return pa.concat_tables(self._map(range(len(self._entries)), columns))
        # on many chunks, Arrow's `take` would copy the whole table: take from shards one by one
        needed = np.unique(positions[positions >= 0])
        indices, firsts = np.unique(
            np.searchsorted(self._ends, needed, side="right"), return_index=True
        )
        shards = self._map(indices, columns)
        parts = []
        for index, shard, mine in zip(indices, shards, np.split(needed, firsts)[1:], strict=True):
            offsets = mine - (self._ends[index] - len(shard))
            stretch = shard.slice(offsets[0], offsets[-1] - offsets[0] + 1)
            parts.append(stretch.combine_chunks().take(offsets - offsets[0]))
        parts = parts or [self._map([0], columns)[0].slice(0, 0)]
        taken = pa.concat_tables(parts).combine_chunks()
        return taken.take(pa.array(np.searchsorted(needed, positions), mask=positions < 0))

    def column(self, name: str) -> pa.ChunkedArray:
        """Return a column of all shards, mapped into memory. [rows]"""
        return self.take(np.arange(len(self)), [name])[name]

    def _map(
        self, indices: Sequence[int] | np.ndarray, columns: list[str] | None = None
    ) -> list[pa.Table]:
        """Return columns of these shards; those that are not mapped yet are checked and mapped."""
        missing = [index for index in indices if index not in self._mapped]
        for start in range(0, len(missing), _AT_ONCE):
            self._read(missing[start : start + _AT_ONCE])
        shards = [self._mapped[index] for index in indices]
        return [shard.select(columns) for shard in shards] if columns else shards

    def _read(self, indices: list[int]) -> None:
        # a copy of the version with these files alone, so that the ordinary reader checks them
        shards = copy.copy(self.version)
        files = tuple(self._entries[index] for index in indices)
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
        if self._mapped and table.schema != next(iter(self._mapped.values())).schema:
            problem = "its columns have other types than those of the other files"
            raise self.version.corrupt(files[0].name, problem)
        start = 0
        for index, entry in zip(indices, files, strict=True):
            self._mapped[index] = table.slice(start, entry.rows)
            start += entry.rows


def schema_of(version: Version) -> pa.Schema:
    """Return the columns that a version has by its kind."""
    return schema_module(version.ref.kind).SCHEMAS[version.manifest.kind_schema]
