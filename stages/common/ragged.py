"""Rows of different lengths as `values` and `offsets`: what an Arrow list column is, and what every
tensor here is.

Nothing is padded and no Python list is made on the way. A tensor that comes from a mapped file is
read-only memory: writing into it in place kills the process (SIGSEGV), or changes somebody else's
data in silence when the column lies on the heap. So clone, convert (`.long()`) or move
(`.to(device)`) before any `_`-method; nothing in this module writes in place into `values`.

    completions = Ragged.from_arrow(table["completion_ids"])     # row i is values[offsets[i]:offsets[i+1]]
    completions.lengths; completions.take(torch.tensor([3, 1])); completions.to_arrow()
    Mapped.from_arrow(table["completion_ids"])                   # the same, but nothing is read before it is looked at
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch


@dataclass(frozen=True)
class Ragged:
    """B rows, N values in all. `values` [N, …] of any dtype, `offsets` [B+1] int64 rising from 0 to
    N.

    >>> Ragged(torch.tensor([45, 2, 7]), torch.tensor([0, 2, 2, 3])).lengths.tolist()
    [2, 0, 1]
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or not len(self.offsets):
            raise ValueError(
                f"offsets must be int64 [B+1], got {self.offsets.dtype} {list(self.offsets.shape)}"
            )
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values):
            raise ValueError(
                f"offsets run from {self.offsets[0]} to {self.offsets[-1]}, expected 0 to "
                f"{len(self.values)}"
            )

    @classmethod
    def from_lengths(cls, values: torch.Tensor, lengths: torch.Tensor) -> Ragged:
        """`values` [N, …] cut into rows of `lengths` [B]."""
        return cls(values, _offsets(lengths))

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray | pa.Array) -> Ragged:
        """A list column of numbers. One chunk is not copied; several are joined by one copy.
        ValueError for any null."""
        chunks = [
            c
            for c in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])
            if len(c)
        ]
        parts = [_chunk(chunk) for chunk in chunks]
        if len(parts) == 1:
            return cls(*parts[0])
        if not parts:
            return cls(
                torch.from_numpy(np.empty(0, column.type.value_type.to_pandas_dtype())),
                torch.zeros(1, dtype=torch.int64),
            )
        lengths = torch.cat([offsets.diff() for _, offsets in parts])
        return cls(torch.cat([values for values, _ in parts]), _offsets(lengths))

    def to_arrow(self) -> pa.Array:
        """A list array whose lists and items are not null. The values are shared, not copied, where
        they lie on the CPU."""
        values = pa.array(self.values.detach().cpu().numpy())
        wide = len(self.values) > np.iinfo(np.int32).max
        offsets = pa.array(self.offsets.cpu().numpy(), pa.int64() if wide else pa.int32())
        kind, array = (pa.large_list, pa.LargeListArray) if wide else (pa.list_, pa.ListArray)
        return array.from_arrays(
            offsets, values, type=kind(pa.field("item", values.type, nullable=False))
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> torch.Tensor:
        """The values of one row, as a view."""
        row = range(len(self))[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[torch.Tensor]:
        bounds = self.offsets.tolist()
        return (self.values[start:end] for start, end in itertools.pairwise(bounds))

    @cached_property
    def lengths(self) -> torch.Tensor:
        """[B] int64."""
        return self.offsets.diff()

    @property
    def segment_ids(self) -> torch.Tensor:
        """[N] int64: the row that each value belongs to."""
        return torch.arange(len(self), device=self.offsets.device).repeat_interleave(self.lengths)

    def with_values(self, values: torch.Tensor) -> Ragged:
        """Other values [N, …] in the same rows."""
        return Ragged(values, self.offsets)

    def positions(self, indices: torch.Tensor) -> torch.Tensor:
        """Where the values of rows `indices` [b] lie in `values`, row after row: [n] int64."""
        lengths = self.lengths[indices]
        ends = lengths.cumsum(0)
        shift = (self.offsets[indices] - (ends - lengths)).repeat_interleave(lengths)
        return shift + torch.arange(len(shift), device=shift.device)

    def take(self, indices: torch.Tensor) -> Ragged:
        """Rows `indices` [b] in that order; a row may be taken twice. Neighbours are taken as one,
        and all rows are a view."""
        offsets, breaks = _offsets(self.lengths[indices]), (indices.diff() != 1).nonzero()[:, 0]
        if len(breaks) >= len(indices) / 4:
            return Ragged(self.values[self.positions(indices)], offsets)
        edges = indices.new_tensor([-1, len(indices) - 1])
        first, last = (
            indices[torch.cat([edges[:1], breaks]) + 1],
            indices[torch.cat([breaks, edges[1:]])],
        )
        runs = zip(self.offsets[first].tolist(), self.offsets[last + 1].tolist(), strict=True)
        parts = [self.values[start:end] for start, end in runs]
        return Ragged(parts[0] if len(parts) == 1 else torch.cat(parts), offsets)

    def views(self, rows: np.ndarray) -> list[np.ndarray]:
        """The values of each of `rows` [b], not copied; on the CPU."""
        values, offsets = self.values.numpy(), self.offsets.numpy()
        return [
            values[start:end]
            for start, end in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
        ]

    def segment_sum(self) -> torch.Tensor:
        """[B, …] sum of each row; 0 for an empty one. Differentiable."""
        zeros = self.values.new_zeros((len(self), *self.values.shape[1:]))
        return zeros.index_add(0, self.segment_ids, self.values)

    def segment_mean(self) -> torch.Tensor:
        """[B, …] mean over each row's own values; 0 for an empty row. Differentiable."""
        lengths = self.lengths.clamp(min=1).to(self.values.dtype)
        return self.segment_sum() / lengths.view(-1, *[1] * (self.values.ndim - 1))


class Mapped(Ragged):
    """Rows of an Arrow column that stay in its chunks, so in the mapped files: only what is looked
    at becomes memory.

    As a `Ragged` otherwise, on the CPU. Rows are taken without copying; `values` joins them all,
    once, for whoever asks.
    """

    def __init__(
        self,
        chunks: Sequence[torch.Tensor],
        chunk_of: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
    ) -> None:
        """Row i is `chunks[chunk_of[i]][starts[i] : starts[i] + lengths[i]]`. [B] int64 each."""
        self.__dict__.update(
            offsets=_offsets(torch.from_numpy(lengths)),
            _chunks=chunks,
            _chunk_of=chunk_of,
            _starts=starts,
        )

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray | pa.Array) -> Mapped:
        """A list column of numbers, however many chunks it has. ValueError for any null."""
        chunks = [
            c
            for c in (column.chunks if isinstance(column, pa.ChunkedArray) else [column])
            if len(c)
        ]
        parts = [_chunk(chunk) for chunk in chunks]
        values = [part for part, _ in parts] or [Ragged.from_arrow(column).values]
        starts = [offsets[:-1] for _, offsets in parts] or [torch.zeros(0, dtype=torch.int64)]
        lengths = [offsets.diff() for _, offsets in parts] or starts
        chunk_of = np.repeat(np.arange(len(chunks)), [len(chunk) for chunk in chunks])
        return cls(values, chunk_of, torch.cat(starts).numpy(), torch.cat(lengths).numpy())

    @cached_property
    def values(self) -> torch.Tensor:
        """[N] all rows' values, joined."""
        views = self.views(np.arange(len(self)))
        return torch.from_numpy(
            np.concatenate(views) if views else self._chunks[0].numpy()[:0].copy()
        )

    def __getitem__(self, row: int) -> torch.Tensor:
        row = range(len(self))[row]
        start = int(self._starts[row])
        return self._chunks[self._chunk_of[row]][start : start + int(self.lengths[row])]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[row] for row in range(len(self)))

    def views(self, rows: np.ndarray) -> list[np.ndarray]:
        arrays, starts = self._arrays, self._starts[rows]
        places = zip(
            self._chunk_of[rows].tolist(),
            starts.tolist(),
            (starts + self.lengths.numpy()[rows]).tolist(),
            strict=True,
        )
        return [arrays[chunk][start:end] for chunk, start, end in places]

    @cached_property
    def _arrays(self) -> list[np.ndarray]:
        return [chunk.numpy() for chunk in self._chunks]

    def take(self, indices: torch.Tensor) -> Mapped:
        rows = indices.numpy()
        return Mapped(
            self._chunks, self._chunk_of[rows], self._starts[rows], self.lengths.numpy()[rows]
        )


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _chunk(chunk: pa.Array) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and offsets of one list array, which may be a slice of a longer one."""
    if chunk.null_count:
        raise ValueError(f"{chunk.null_count} rows are null; a ragged column has none")
    width = np.int64 if pa.types.is_large_list(chunk.type) else np.int32
    offsets = np.frombuffer(chunk.buffers()[1], width)[
        chunk.offset : chunk.offset + len(chunk) + 1
    ].astype(np.int64)
    values = chunk.values[offsets[0] : offsets[-1]]
    if values.null_count:
        raise ValueError(f"{values.null_count} items are null; a ragged column has none")
    if not len(values):
        return torch.from_numpy(np.empty(0, values.type.to_pandas_dtype())), torch.from_numpy(
            offsets - offsets[0]
        )
    return torch.from_dlpack(values), torch.from_numpy(offsets - offsets[0])
