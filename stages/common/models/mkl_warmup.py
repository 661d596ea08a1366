"""The first calls of torch's functions of single numbers on a CPU, made by one thread before
anything depends on them.

MKL looks for the code of such a function when it is first called. When two threads do so at once,
one of them may compute its share of that very call with half of the digits: cosines of positions
were wrong by 1.5e-4, and logprobs by 3e-3, in one process of twenty
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
"""Those that torch hands to MKL."""


@cache
def make_first_calls() -> None:
    """Call each function for one number, in either precision; once a process."""
    import torch

    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype)
        for name in (*FUNCTIONS, "trunc"):
            getattr(torch, name)(number)
