"""The calls by which the store changes the disk, seen from outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

CALLS = ("fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir", "utime")
Around = Callable[[str, Callable[[], Any], tuple], Any]
"""Is given the name of a call, the call itself, and its arguments; returns what the call does."""


@contextmanager
def watched(around: Around) -> Iterator[None]:
    """Every flush, and every change of a folder by this process, goes through `around`."""

    def watch(name: str) -> Callable:
        real = getattr(os, name)

        def call(*arguments, **options):
            return around(name, lambda: real(*arguments, **options), arguments)

        return call

    with patch.multiple(os, **{name: watch(name) for name in CALLS}):
        yield
