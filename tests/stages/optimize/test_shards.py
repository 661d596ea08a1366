"""Room on disk for whole tensors."""

import os
from pathlib import Path

import pytest
import torch

from quiver.stages.optimize import sharding
from quiver.stages.optimize.sharding import Room


def test_a_room_takes_tensors_as_they_are_and_leaves_no_file(tmp_path):
    room = Room(tmp_path)
    tensors = [
        torch.arange(6.0).view(2, 3).T,
        torch.ones(5000, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor(7.0),
    ]
    copies = [room.copy(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert torch.equal(copy, tensor) and copy.dtype == tensor.dtype and copy.is_contiguous()
    copies[0] += 1
    assert torch.equal(copies[0], tensors[0] + 1), "it may be worked on in place"
    assert [*tmp_path.iterdir()] == []


def test_many_tensors_are_few_open_files(tmp_path):
    """A usual limit is 1,024 of them, a model of 8 billion weights has 291 tensors and their
    moments."""
    before = len(os.listdir("/proc/self/fd"))
    room = Room(tmp_path)
    copies = [room.copy(torch.full((100,), float(number))) for number in range(2000)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert [float(copy[99]) for copy in copies] == list(range(2000))


def test_tensors_may_be_larger_than_a_region(tmp_path, monkeypatch):
    monkeypatch.setattr(sharding, "_REGION_BYTES", 1)
    room = Room(tmp_path)
    tensors = [torch.arange(5000 * number) for number in (1, 3, 2)]
    copies = [room.copy(tensor) for tensor in tensors]
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_a_rank_that_only_gives_its_rows_gets_none():
    assert Room(None).copy(torch.ones(3)).numel() == 0


def test_a_disk_without_room_is_an_error_and_no_signal():
    """Where memory is mapped to more than a disk has, the first write to it ends the process."""
    with pytest.raises(OSError):
        Room(Path("/dev/shm")).copy(torch.empty(1).expand(1 << 46))
