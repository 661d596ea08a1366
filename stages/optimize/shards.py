"""Tensors of which each rank holds its share of the rows, and how they become whole again, one
after another, without anybody's memory holding all of them.

    torch.optim.AdamW's moments, a parameter, its gradient      this rank's rows (a DTensor)
    like(tensor, parameter)      of a whole tensor the rows that this rank has of `parameter`
    Room(folder).copy(tensor)    the whole tensor, in a file of which memory holds what is in use

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
    """Whether it is a share of a tensor, the rest of which other ranks have."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Of a sharded tensor this rank's rows; any other as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, which is whole, on the device of `parameter`; where that is sharded, this rank's
    rows of it. What counts steps has no rows and stays whole."""
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
    """A file without a name that takes whole tensors, on rank 0; it is gone with the last of them,
    and when the process dies.

    What lies in it is the kernel's to write out and read again, so it needs disk and not memory.
    """

    def __init__(self, folder: Path | None) -> None:
        """`folder`: where there is disk for it, made if need be; None on the ranks that only give
        their rows."""
        if folder is not None:
            folder.mkdir(exist_ok=True)
        self._file = None if folder is None else tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._end = 0
        """Of what is mapped of the file."""
        self._pages: mmap.mmap | None = None
        """The last region. Each is an open file more, so one a tensor would be too many."""
        self._used = 0
        """Bytes of it."""

    def copy(self, tensor: Tensor) -> Tensor:
        """All of `tensor`, in CPU memory that is the file's; nothing on a rank without a file.
        Every rank calls this, for the same tensors in the same order. OSError: the disk is full."""
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
        # a page that finds no place on the disk would end the process
        start = self._end - len(self._pages) + self._used
        os.posix_fallocate(self._file.fileno(), start, whole.nbytes)
        copy = torch.frombuffer(
            self._pages, dtype=whole.dtype, count=whole.numel(), offset=self._used
        )
        self._used += -(-whole.nbytes // _ALIGNMENT) * _ALIGNMENT
        return copy.view(whole.shape).copy_(whole)
