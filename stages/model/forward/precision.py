"""The precision of a pass, by name, as `optimize` and `logprobs` use it.

| name | weights | matrix products |
|---|---|---|
| `fp32` | float32 | float32; on a CPU by the faster of torch's two ways, if that is exact too |
| `bf16` | float32 | bfloat16 (autocast); norms and softmax in float32 |
| `bf16_pure` | bfloat16 | bfloat16, and so are all states between layers |

In every precision, logits become float32 before temperature and softmax. A stage's config lists the
names that it knows.

Not of the spine: to the trainer a precision is a name, explained by the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn


def choose_precision(precision: str, device: torch.device) -> str:
    """Return `precision`; for `auto`, the device's default: bf16 on a GPU, fp32 on a CPU."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"


@contextmanager
def products(device: torch.device) -> Iterator[None]:
    """Make products of float32 matrices as fast as they are exact, while the context is open.

    By default torch multiplies with MKL on a CPU, which on processors not made by Intel has half of
    oneDNN's speed. With `medium` precision torch uses oneDNN, which on processors without AMX still
    computes in float32. The setting applies to the whole process, so it covers the backward pass in
    other threads too.
    """
    before = torch.get_float32_matmul_precision()
    if device.type == "cpu" and onednn_is_exact():
        torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@cache
def onednn_is_exact() -> bool:
    """True if this processor's `medium` products are float32.

    Measured against float64: the relative error must be at most 1e-6 (float32 is at 2e-7, TF32 and
    three bfloat16 products at 1e-5 or more).
    """
    draw = torch.Generator().manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    errors = []
    for shape in ((64, 576, 192), (256, 576, 1536), (16, 4096, 1024)):
        a = torch.randn(shape[:2], generator=draw)
        b = torch.randn(shape[1:], generator=draw)
        exact = a.double() @ b.double()
        for product in (a @ b, (b.T @ a.T).T, torch.bmm(a[None], b[None])[0]):
            errors.append(float((product - exact).norm() / exact.norm()))
    torch.set_float32_matmul_precision(before)
    return max(errors) <= 1e-6


@contextmanager
def layers_in_float32(model: nn.Module) -> Iterator[None]:
    """Make bfloat16 weights float32 while the context is open.

    The weights of a layer are widened only while it computes, so that the other layers need no more
    memory; weights outside the layers are widened all the time.
    """
    narrow_weights: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}

    def widen(module: nn.Module, *_: object) -> None:
        parameters = [p for p in module.parameters() if p.dtype == torch.bfloat16]
        narrow_weights[module] = [(parameter, parameter.data) for parameter in parameters]
        for parameter in parameters:
            parameter.data = parameter.data.float()

    def restore(module: nn.Module, *_: object) -> None:
        for parameter, weight in narrow_weights.pop(module):
            parameter.data = weight

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    layers = list(dict.fromkeys(layer for module_list in lists for layer in module_list))
    in_layers = {parameter for layer in layers for parameter in layer.parameters()}
    outside = nn.ParameterList(p for p in model.parameters() if p not in in_layers)
    hooks = [layer.register_forward_pre_hook(widen) for layer in layers]
    hooks += [layer.register_forward_hook(restore, always_call=True) for layer in layers]
    widen(outside)
    try:
        yield
    finally:
        restore(outside)
        for hook in hooks:
            hook.remove()


def narrow(model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Round the weights of `model` to bfloat16 in place (to nearest), and return the originals.

    Gradients become float32, so that sums over micro-batches lose nothing. Buffers are unchanged:
    rotary frequencies in bfloat16 would confuse positions.
    """
    before = {}
    for parameter in model.parameters():
        before[parameter] = parameter.data
        parameter.data = parameter.data.to(torch.bfloat16, memory_format=torch.contiguous_format)
        parameter.grad_dtype = torch.float32
    return before
