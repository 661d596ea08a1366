"""Tensors that are sharded by rows over the ranks, and how they are made whole one by one without
holding all of them in memory.

    torch.optim.AdamW's moments, a parameter, its gradient      this rank's rows (a DTensor)
    like(tensor, parameter)      this rank's rows of a whole tensor, split as `parameter` is
    Room(folder).copy(tensor)    the whole tensor, in a file that is mapped into memory

Not of the spine: only a training with `optimize.shard` has such tensors.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_REGION_BYTES = 1 << 32
_ALIGNMENT = 64


def is_sharded(tensor: Tensor) -> bool:
    """True if `tensor` is this rank's share of a tensor."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole `tensor` on the device of `parameter` or, if that is sharded, this rank's
    rows of it. A step count has no rows and stays whole."""
    if not is_sharded(parameter) or not tensor.ndim:
        return tensor.to(parameter.device)
    from torch.distributed.tensor import DTensor

    mesh = parameter.device_mesh
    num_rows = -(-len(tensor) // mesh.size())
    first = mesh.get_local_rank() * num_rows
    rows = tensor[first : first + num_rows].to(parameter.device, copy=True)
    return DTensor.from_local(
        rows.contiguous(),
        mesh,
        parameter.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


class Room:
    """An unnamed file on rank 0 that holds whole tensors. It is freed with the last of them, or
    when the process dies.

    The kernel writes its pages out and reads them again, so it needs disk, not memory.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where the file is made, created if absent; None on ranks that only send their
        rows."""
        if folder is not None:
            folder.mkdir(exist_ok=True)
        self._file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._end = 0
        """End of the mapped part of the file, in bytes."""
        self._pages: mmap.mmap | None = None
        """The last mapped region. Each region holds a file open, so one for each tensor would be
        too many."""
        self._used = 0
        """Bytes used in the last region."""

    def copy(self, tensor: Tensor) -> Tensor:
        """Return all of `tensor`, in CPU memory backed by the file; an empty tensor on a rank
        without a file. Every rank calls this, for the same tensors in the same order. Raises
        OSError if the disk is full."""
        whole = tensor.detach()
        if is_sharded(whole):
            whole = whole.full_tensor()
        if self._file is None:
            return torch.empty(0, dtype=tensor.dtype)
        if not whole.numel() or not whole.ndim:
            return whole.to("cpu", copy=True)
        if self._pages is None or self._used + whole.nbytes > len(self._pages):
            pages = -(-max(whole.nbytes, _REGION_BYTES) // mmap.ALLOCATIONGRANULARITY)
            size = pages * mmap.ALLOCATIONGRANULARITY
            os.ftruncate(self._file.fileno(), self._end + size)
            self._pages = mmap.mmap(self._file.fileno(), size, offset=self._end)
            self._end += size
            self._used = 0
        # reserve the disk first: writing a mapped page to a full disk kills the process
        start = self._end - len(self._pages) + self._used
        os.posix_fallocate(self._file.fileno(), start, whole.nbytes)
        copy = torch.frombuffer(
            self._pages, dtype=whole.dtype, count=whole.numel(), offset=self._used
        )
        self._used += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT
        return copy.view(whole.shape).copy_(whole)
