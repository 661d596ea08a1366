"""Whether the kernels are used: by device, dtype and build, never by a clock, so that two runs have
the same ones. What they take the place of runs everywhere else, and is what they are held to.

    if fits(states): …              # this device, this dtype, and Triton is installed
    agree(outputs, expected)        # what a kernel gave against what it stands for
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

DEVICES = {"cuda"}
"""Types of devices for which Triton compiles. The tests add those that it only acts for."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""The largest difference that is rounding, as a share of the norm."""


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def fits(*tensors: Tensor) -> bool:
    """Whether there are kernels for all of `tensors`."""
    return all(t.device.type in DEVICES and t.dtype in _DTYPES for t in tensors) and _has_triton()


def precision_of_products(dtype: torch.dtype) -> torch.dtype:
    """What products of matrices in `dtype` are exact to. TF32 has as many digits as float16, and
    the last bit of a factor can change the last of those."""
    is_coarse = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return torch.float16 if is_coarse else dtype


def agree(
    outputs: Iterable[Tensor], expected: Iterable[Tensor], precision: torch.dtype | None = None
) -> bool:
    """Whether each of `outputs` has the dtype and shape that is expected, and its numbers but for
    rounding to `precision` or to its dtype. Of tensors without content the numbers are not asked.
    """
    for output, wanted in zip(outputs, expected, strict=True):
        if (output.dtype, output.shape) != (wanted.dtype, wanted.shape):
            return False
        if output.device.type != "meta":
            gap = (output.double() - wanted.double()).norm()
            if (
                not gap <= _TOLERANCES[precision or output.dtype] * wanted.double().norm()
            ):  # NaN is not
                return False
    return True
