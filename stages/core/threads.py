"""Helpers for threads: map a function over many inputs, and parse Python safely.

`map_in_threads` uses as many threads as this process has cores. Threads help only for work that
releases Python's lock, such as hashing and waiting for other processes. A single input needs none.

Not of the spine: the results equal those from `map` and `ast.parse`.
"""

from __future__ import annotations

import ast
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_PARSER = threading.Lock()
_MOST_PARSES = 20
"""Most tries to parse one source."""
_MOST_TASKS = 1000
"""Most tasks that the inputs are split into: a task costs as much as reading a small file."""


def map_in_threads(function: Callable[[In], Out], inputs: Iterable[In]) -> list[Out]:
    """Apply `function` to each input, in order.

    If several raise, the error of the first input is raised, and calls that still wait are not
    started.
    """
    inputs = list(inputs)
    if len(inputs) < 2:
        return list(map(function, inputs))
    size = 1 + len(inputs) // _MOST_TASKS
    groups = [inputs[start : start + size] for start in range(0, len(inputs), size)]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(lambda group: list(map(function, group)), groups)
        return [result for group in results for result in group]


def parse_python(source: str | bytes) -> ast.Module:
    """Return the syntax tree of `source`, as `ast.parse` does, with its errors.

    Two threads must not parse at once: in Python 3.11 that occasionally fails with a SystemError,
    because the parser counts the tree's depth in one place for all threads (python/cpython issue
    106905). Our threads take turns. A library's thread does not, so a failed parse is repeated.
    """
    with _PARSER:
        for _ in range(_MOST_PARSES - 1):
            with suppress(SystemError):
                return ast.parse(source)
            time.sleep(0.001)  # the other parse may end meanwhile
        return ast.parse(source)
