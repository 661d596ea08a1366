"""Decides whether kernels are used, and checks them against the plain operations they replace.

Device, dtype and build decide, never a timing, so two runs use the same kernels. The plain
operations run everywhere else.

    if fits(states): …              # this device, this dtype, and Triton is installed
    agree(outputs, expected)        # compare a kernel's outputs with the plain operation's
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

DEVICES = {"cuda"}
"""Device types for which Triton compiles. Tests add types on which Triton is emulated, or on which
only shapes are computed (meta)."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest difference that counts as rounding, as a share of the norm."""


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
            if (
                not gap <= _TOLERANCES[precision or output.dtype] * wanted.double().norm()
            ):  # written so that NaN fails too
                return False
    return True
