"""A function over many files or programs at once, in as many threads as this process has cores.

For what lets go of Python's lock: hashing, other processes. One thing alone needs no thread.

Not of the spine: the results are those of `map`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")


def map_in_threads(function: Callable[[In], Out], inputs: Iterable[In]) -> list[Out]:
    """`function` of each input, in order. Of several errors the first one's is raised, and what
    waits then is not begun."""
    inputs = list(inputs)
    if len(inputs) < 2:
        return list(map(function, inputs))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, inputs))
