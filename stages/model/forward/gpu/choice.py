"""Decides whether kernels are used, checks them, and has the small functions that choose by device.

Device, dtype and build decide, never a timing, so two runs use the same kernels. The plain
operations run everywhere else.

    if fits(states): …              # this device, this dtype, and Triton is installed
    agree(outputs, expected)        # compare a kernel's outputs with the plain operation's
    logits = float32_product(hidden, weight.T)
    total = float32_product(grad.T, states, total)     # total += …, in the product's own kernel
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

DEVICES = {"cuda"}
"""Device types for which Triton compiles. Tests add types on which Triton is emulated, or on which
only shapes are computed (meta)."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference that counts as rounding, as a share of the norm."""
MOST_SHARES = 512
"""Most shares into which the gradient of a norm's weight is split."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fits(*tensors: Tensor) -> bool:
    """True if there are kernels for all of `tensors`."""
    return all(t.device.type in DEVICES and t.dtype in _DTYPES for t in tensors) and _has_triton()


def precision_of_products(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype whose precision matrix products in `dtype` have.

    TF32 has as many digits as float16, and the last bit of a factor can change the last of those.
    """
    is_coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if is_coarse else dtype


def agree(
    outputs: Iterable[Tensor], expected: Iterable[Tensor], precision: torch.dtype | None = None
) -> bool:
    """True if each of `outputs` has the expected dtype and shape, and the same numbers.

    Numbers may differ by rounding to `precision`, or by default to their own dtype. Numbers of
    tensors without content (meta) are not compared.
    """
    for output, wanted in zip(outputs, expected, strict=True):
        if (output.dtype, output.shape) != (wanted.dtype, wanted.shape):
            return False
        if output.device.type != "meta":
            gap = (output.double() - wanted.double()).norm()
            largest = _TOLERANCES[precision or output.dtype] * wanted.double().norm()
            if not gap <= largest:  # written so that NaN fails too
                return False
    return True


# -- products of bfloat16 matrices with float32 results


def uncast(factor: Tensor) -> AbstractContextManager[Any]:
    """Return a context in which autocast leaves products of matrices like `factor` as they are; it
    opens nothing if autocast would do so, since that takes the host several microseconds."""
    device = factor.device.type
    if torch.is_autocast_enabled(device) and factor.dtype != torch.get_autocast_dtype(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def float32_product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """Return left @ right in float32, by one kernel if the device's library has it, since the sums
    of a product are float32 anyway; if `total` (float32) is given, add to it in place.

    If the device has no such product, the product is made in the factors' dtype and converted.
    """
    with uncast(left):
        can_widen, can_add = _abilities(left.device.type, left.dtype)
        if total is None:
            options = {"out_dtype": torch.float32} if can_widen else {}
            return torch.mm(left, right, **options).float()
        if can_add:
            return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        return total.add_(float32_product(left, right))


def makes_float32(states: Tensor) -> bool:
    """True if one kernel makes a float32 product of two matrices like `states`."""
    return _abilities(states.device.type, states.dtype)[0]


@cache
def _abilities(device: str, dtype: torch.dtype) -> tuple[bool, bool]:
    """Return whether a product in `dtype` can be float32, and can be added to a float32 matrix.

    Tried, because builds differ.
    """
    if device not in ("cuda", "meta") or dtype not in (torch.bfloat16, torch.float16):
        return False, False
    ones = torch.ones(16, 16, dtype=dtype, device=device)
    total = torch.ones(16, 16, device=device)
    abilities = []
    for added in (None, total):
        options = {"out_dtype": torch.float32}
        try:
            if added is None:
                product = torch.mm(ones, ones, **options)
            else:
                product = torch.addmm(added, ones, ones, out=added, **options)
        except (NotImplementedError, RuntimeError, TypeError):
            abilities.append(False)
        else:
            expected = torch.full_like(total, 16 if added is None else 17)
            is_right = product.dtype == torch.float32
            abilities.append(is_right and (device == "meta" or torch.equal(product, expected)))
    return tuple(abilities)


# -- gradients added to those of earlier micro-batches


def gradient_of(weight: Tensor) -> Tensor | None:
    """Return the gradient of `weight` so far, if a backward pass may add to it in place and return
    none: that saves autograd a sum of its own. None: autograd adds it up."""
    grad = weight.grad if weight.is_leaf and weight.dtype == torch.float32 else None
    return grad if grad is not None and grad.dtype == torch.float32 else None


def sum_of_shares(shares: Tensor, weight: Tensor) -> Tensor | None:
    """Return the sum of the shares [p, width] of the gradient of `weight` [width]; None if it was
    added to the gradient so far."""
    total = gradient_of(weight)
    if total is None:
        return shares.sum(0).to(weight.dtype)
    total.addmv_(shares.T, _ones(shares.device)[: len(shares)])
    return None


@cache
def _ones(device: torch.device) -> Tensor:
    return torch.ones(MOST_SHARES, device=device)
