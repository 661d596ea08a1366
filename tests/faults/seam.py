"""The calls by which the store changes the disk, seen from outside."""

from __future__ import annotations

import os
import shutil  # noqa: F401  # it asks once, when it is imported, what the real calls can do
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

CALLS = ("fsync", "rename", "replace", "link", "unlink", "mkdir", "rmdir")
Around = Callable[[str, str, Callable[[], Any]], Any]
"""Gets the name of a call, the path that it flushes or changes, and the call itself; returns what
the call returns."""


@contextmanager
def watched(around: Around) -> Iterator[None]:
    """Every flush, and every change of a folder by this process, goes through `around`."""

    def watch(name: str) -> Callable:
        real = getattr(os, name)

        def call(*arguments, **options):
            path = arguments[name in ("rename", "replace", "link")]
            if name == "fsync":
                path = os.readlink(f"/proc/self/fd/{path}")
            elif options.get("dir_fd") is not None:
                path = os.path.join(os.readlink(f"/proc/self/fd/{options['dir_fd']}"), path)
            return around(name, os.fspath(path), lambda: real(*arguments, **options))

        return call

    with patch.multiple(os, **{name: watch(name) for name in CALLS}):
        yield
