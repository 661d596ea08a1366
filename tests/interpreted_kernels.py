"""The GPU's kernels on a CPU, by Triton's interpreter, as a plugin of pytest: `pytest -p
tests.interpreted_kernels TESTS`. It stands for the whole process, so only a process of its own
imports this module."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from quiver.stages.model.forward.gpu import choice

choice.DEVICES.add("cpu")
_convert = interpreter._convert_float


def _convert_as_a_gpu(numbers, dtype, new_dtype, rounding):
    """The interpreter cuts bfloat16 off, where a GPU rounds to the nearest, and to even."""
    if (dtype, new_dtype) != (tl.float32, tl.bfloat16):
        return _convert(numbers, dtype, new_dtype, rounding)
    bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
    bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    is_nan = np.isnan(np.asarray(numbers).view(np.float32))
    return np.where(is_nan, np.uint16(0x7FC0), bits)


interpreter._convert_float = _convert_as_a_gpu
