"""Ragged rows as `values` and `offsets`, the layout of Arrow list columns and of every tensor here.

Nothing is padded, and no Python list is made on the way. A tensor from a mapped file is read-only
memory: writing to it in place kills the process (SIGSEGV). If the column is on the heap, writing
silently changes data that others share. So clone, convert (`.long()`) or move (`.to(device)`)
before any `_`-method. Nothing in this module writes into `values` in place.

    completions = Ragged.from_arrow(table["completion_ids"])
    completions[i]                             # values[offsets[i] : offsets[i + 1]]
    completions.lengths; completions.take(torch.tensor([3, 1])); completions.to_arrow()
    Mapped.from_arrow(table["completion_ids"]) # the same, but nothing is read before it is needed

Not of the spine: row i is `values[offsets[i] : offsets[i + 1]]`, and that is enough to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """B rows with N values in all: `values` [N, …] of any dtype, `offsets` [B+1] int64 from 0 to N.

    >>> Ragged(torch.tensor([45, 2, 7]), torch.tensor([0, 2, 2, 3])).lengths.tolist()
    [2, 0, 1]
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.offsets.dtype != torch.int64 or self.offsets.ndim != 1 or not len(self.offsets):
            raise ValueError(
                f"offsets must be int64 [B+1], got {self.offsets.dtype} {list(self.offsets.shape)}"
            )
        if self.offsets.device.type != "cpu":
            # the check would make the host wait for the device, and offsets come from a CPU
            return
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.values):
            raise ValueError(
                f"offsets run from {self.offsets[0]} to {self.offsets[-1]}, expected 0 to "
                f"{len(self.values)}"
            )

    @classmethod
    def from_lengths(cls, values: Tensor, lengths: Tensor) -> Ragged:
        """Cut `values` [N, …] into rows of `lengths` [B]."""
        return cls(values, _offsets(lengths))

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray | pa.Array) -> Ragged:
        """Read a list column of numbers. One chunk is not copied; several are joined by one copy.

        Raises ValueError for any null.
        """
        chunks = _chunks(column)
        return chunks[0] if len(chunks) == 1 else cls.joined(chunks)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Return the rows of all `parts`, one part after another."""
        values = torch.cat([part.values for part in parts])
        return cls.from_lengths(values, torch.cat([part.lengths for part in parts]))

    def to_arrow(self) -> pa.Array:
        """Return a list array without nulls. Values on the CPU are shared, not copied."""
        values = pa.array(self.values.detach().cpu().numpy())
        field = pa.field("item", values.type, nullable=False)
        # Arrow's list type has int32 offsets
        offsets = pa.array(self.offsets.cpu().numpy(), pa.int32())
        return pa.ListArray.from_arrays(offsets, values, type=pa.list_(field))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Tensor:
        """Return the values of one row, as a view.

        Raises IndexError beyond the last row, which ends a loop over all rows.
        """
        row = range(len(self))[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def lengths(self) -> Tensor:
        """[B] int64: the number of values in each row."""
        return self.offsets.diff()

    @property
    def segment_ids(self) -> Tensor:
        """[N] int64: the row that each value belongs to."""
        rows = torch.arange(len(self), device=self.offsets.device)
        return _repeat(rows, self.lengths, len(self.values))

    def with_values(self, values: Tensor) -> Ragged:
        """Return other values [N, …] in the same rows."""
        return Ragged(values, self.offsets)

    def places(self, indices: Tensor) -> Tensor:
        """Return the places in `values` of rows `indices` [b], row after row: [n] int64."""
        lengths = self.lengths[indices]
        starts_here = lengths.cumsum(0) - lengths
        shift = _repeat(self.offsets[indices] - starts_here, lengths, int(lengths.sum()))
        return shift + torch.arange(len(shift), device=shift.device)

    def take(self, indices: Tensor) -> Ragged:
        """Return rows `indices` [b] in that order; a row may be taken twice. CPU only.

        If the rows are consecutive, the values are a view.
        """
        offsets = _offsets(self.lengths[indices])
        if len(indices) and (indices.diff() == 1).all():
            start = self.offsets[indices[0]]
            return Ragged(self.values[start : start + offsets[-1]], offsets)
        views = [self.values[:0].numpy(), *self.views(indices.numpy())]
        return Ragged(torch.from_numpy(np.concatenate(views)), offsets)

    def views(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the values of each of `rows` [b], without a copy. CPU only."""
        values = self.values.numpy()
        offsets = self.offsets.numpy()
        bounds = zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
        return [values[start:end] for start, end in bounds]

    def segment_sum(self) -> Tensor:
        """Sum each row: [B, …]; 0 for an empty one. Differentiable."""
        zeros = self.values.new_zeros((len(self), *self.values.shape[1:]))
        return zeros.index_add(0, self.segment_ids, self.values)

    def segment_mean(self) -> Tensor:
        """Average over each row's own values: [B, …]; 0 for an empty row. Differentiable."""
        lengths = self.lengths.clamp(min=1).to(self.values.dtype)
        return self.segment_sum() / lengths.view(-1, *[1] * (self.values.ndim - 1))


class Mapped(Ragged):
    """Rows of an Arrow column that stay in its chunks, and so in the mapped files.

    Only the rows that are read use memory; each row also needs 28 bytes. Otherwise it is like
    `Ragged`, on the CPU. Rows are taken without a copy; `values` joins all of them once, when it is
    first used.
    """

    def __init__(
        self, chunks: list[np.ndarray], chunk_of: np.ndarray, starts: np.ndarray, lengths: Tensor
    ) -> None:
        """Hold rows in chunks.

        Args:
            chunks: the values of each chunk.
            chunk_of: [B] int32, the chunk of each row.
            starts: [B] int64, the row's position in its chunk.
            lengths: [B] int64.
        """
        # bypass the dataclass, which is frozen and would set `values`
        vars(self).update(
            offsets=_offsets(lengths), _chunks=chunks, _chunk_of=chunk_of, _starts=starts
        )

    @classmethod
    def from_arrow(cls, column: pa.ChunkedArray | pa.Array) -> Mapped:
        """Read a list column of numbers in any number of chunks. Raises ValueError for nulls."""
        chunks = _chunks(column)
        counts = [len(chunk) for chunk in chunks]
        return cls(
            [chunk.values.numpy() for chunk in chunks],
            np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
            np.concatenate([chunk.offsets[:-1].numpy() for chunk in chunks]),
            torch.cat([chunk.lengths for chunk in chunks]),
        )

    @cached_property
    def values(self) -> Tensor:
        """[N] all rows' values, joined."""
        views = self.views(np.arange(len(self)))
        return torch.from_numpy(np.concatenate([self._chunks[0][:0], *views]))

    def __getitem__(self, row: int) -> Tensor:
        row = range(len(self))[row]
        return torch.from_numpy(self.views(np.array([row]))[0])

    def views(self, rows: np.ndarray) -> list[np.ndarray]:
        chunks = self._chunk_of[rows].tolist()
        starts = self._starts[rows]
        ends = starts + self.lengths.numpy()[rows]
        bounds = zip(chunks, starts.tolist(), ends.tolist(), strict=True)
        return [self._chunks[chunk][start:end] for chunk, start, end in bounds]

    def take(self, indices: Tensor) -> Mapped:
        rows = indices.numpy()
        places = self._chunk_of[rows], self._starts[rows]
        return Mapped(self._chunks, *places, self.lengths[indices])


def _offsets(lengths: Tensor) -> Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def _chunks(column: pa.ChunkedArray | pa.Array) -> list[Ragged]:
    """Return the chunks of a list column that have rows, without a copy.

    An empty column gives one chunk without rows. A chunk may be a slice of a longer array.
    """
    arrays = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    arrays = [array for array in arrays if len(array)] or [pa.array([], column.type)]
    chunks = []
    for array in arrays:
        offsets = array.offsets.to_numpy().astype(np.int64)
        values = array.values[offsets[0] : offsets[-1]]
        for what, nulls in (("rows", array.null_count), ("items", values.null_count)):
            if nulls:
                raise ValueError(f"{nulls} {what} are null; a ragged column has none")
        # without values, Arrow's buffer has no address
        tensor = (
            torch.from_dlpack(values)
            if len(values)
            else torch.from_numpy(np.empty(0, values.type.to_pandas_dtype()))
        )
        chunks.append(Ragged(tensor, torch.from_numpy(offsets - offsets[0])))
    return chunks


def _repeat(values: Tensor, counts: Tensor, total: int) -> Tensor:
    """Repeat each of `values` [n] as often as `counts` [n] say, `total` numbers in all.

    On a CPU, torch's own function starts threads even for short inputs, which disturb the model's
    threads.
    """
    if values.device.type != "cpu":
        # without the total, the host would wait for the device to compute it
        return values.repeat_interleave(counts, output_size=total)
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
