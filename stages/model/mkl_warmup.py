"""Makes the first call of each torch function that uses MKL, in one thread, before it matters.

MKL looks up the code of such a function at its first call. If two threads make that call at once,
one of them may compute its share with half of the digits. Cosines of positions were wrong by
1.5e-4, and logprobs by 3e-3, in one process of twenty
(https://github.com/pytorch/pytorch/issues/188792).
"""

from __future__ import annotations

from functools import cache

FUNCTIONS = (
    "acos",
    "asin",
    "atan",
    "cos",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "log",
    "log10",
    "log2",
    "sin",
    "sqrt",
    "tan",
    "tanh",
)
"""Elementwise functions that torch delegates to MKL on a CPU."""


@cache
def make_first_calls() -> None:
    """Call each function, and trunc, on one number in float32 and float64, once per process."""
    import torch

    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in (*FUNCTIONS, "trunc"):
            getattr(torch, name)(number)
