"""The precision of a pass by its name, for whoever runs one: optimize and logprobs.

| name | weights | products of matrices |
|---|---|---|
| `fp32` | float32 | float32 |
| `fp32_fast` | float32 | float32 in and out, inside as is fast: TF32 on a GPU; on a CPU oneDNN's, bfloat16 on processors with AMX |
| `bf16` | float32 | bfloat16 (autocast); norms and softmax in float32 |
| `bf16_pure` | bfloat16 | bfloat16, and so is all that layers hand on |

Whatever the name, logits become float32 before temperature and softmax. Which names a stage knows, its config says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def resolve(precision: str, device: torch.device) -> str:
    """`precision`, and for `auto` that of the device: bf16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"


@contextmanager
def fast_products(device: torch.device) -> Iterator[None]:
    """Products of float32 matrices as `fp32_fast` has them, for as long as it is open; then as they were.

    The setting is the whole process's, so the backward pass, whatever thread it runs in, is meant too.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def narrow(model: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """Make the weights of `model` bfloat16 in place, rounded to nearest; what each was before.

    Gradients become float32, so that sums over micro-batches lose nothing. Buffers stay: rotary frequencies in bfloat16 would
    confuse positions.
    """
    before = {}
    for parameter in model.parameters():
        before[parameter] = parameter.data
        parameter.data = parameter.data.to(torch.bfloat16, memory_format=torch.contiguous_format)
        parameter.grad_dtype = torch.float32
    return before
