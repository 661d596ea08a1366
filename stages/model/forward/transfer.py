"""Moves what a micro-batch reads to the device: all its tensors by one copy.

    layout, columns = to_device((layout, columns), device)

Each copy of its own costs a launch, and one from memory that is not pinned makes the host wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes; a tensor in the buffer begins at a multiple of it."""
T = TypeVar("T")


def to_device(tree: T, device: torch.device | str) -> T:
    """Return `tree` with its tensors on `device`; NumPy arrays stay on the CPU.

    A tree is made of tuples, dicts and dataclasses. On a CPU it is returned as it is.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return tree
    tensors: list[Tensor] = []
    _replace_tensors(tree, lambda tensor: tensors.append(tensor.contiguous()))
    padded = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    buffer = torch.empty(sum(padded), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, part in zip(tensors, buffer.split(padded), strict=True):
        _typed(part, tensor).copy_(tensor)
    moved = buffer.to(device, non_blocking=True).split(padded)
    views = iter([_typed(part, tensor) for part, tensor in zip(moved, tensors, strict=True)])
    return _replace_tensors(tree, lambda _: next(views))


def _typed(part: Tensor, like: Tensor) -> Tensor:
    """Return the bytes `part` as a tensor like `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)


def _replace_tensors(tree: T, function: Callable[[Tensor], object]) -> T:
    """Return `tree` with the result of `function` in place of each tensor, in a fixed order."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {name: _replace_tensors(each, function) for name, each in tree.items()}
    if isinstance(tree, tuple):
        parts = [_replace_tensors(each, function) for each in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if is_dataclass(tree):
        names = [field.name for field in fields(tree) if field.init]
        return replace(tree, **{n: _replace_tensors(getattr(tree, n), function) for n in names})
    return tree
