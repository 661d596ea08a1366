"""What threads do together: a function over many files or programs at once, in as many threads as
this process has cores; and Python's parser, which takes one thread at a time.

Threads are for what lets go of Python's lock: hashing, other processes. One thing alone needs none.

Not of the spine: the results are those of `map` and `ast.parse`.
"""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_PARSER = threading.Lock()


def map_in_threads(function: Callable[[In], Out], inputs: Iterable[In]) -> list[Out]:
    """`function` of each input, in order. Of several errors the first one's is raised, and what
    waits then is not begun."""
    inputs = list(inputs)
    if len(inputs) < 2:
        return list(map(function, inputs))
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(function, inputs))


def parse_python(source: str | bytes) -> ast.Module:
    """The syntax tree of `source`; errors are those of `ast.parse`.

    In Python 3.11 two threads that parse at once fail now and then with a SystemError: its parser
    counts the depth of the tree in one place for all threads (python/cpython issue 106905).
    """
    with _PARSER:
        return ast.parse(source)
