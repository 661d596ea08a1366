"""Which library gives memory to a stage's process: tcmalloc where this host has it.

A process of the optimizer is a little smaller so, and as fast or a little faster in most shapes
(tests/benchmarks/RESULTS.md).

Not of the spine: what a stage makes does not depend on it.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_NAMES = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")


def allocator_environment() -> dict[str, str]:
    """What makes a child process take it. Nothing where LD_PRELOAD is set, be it to nothing: then
    its user has chosen."""
    library = _tcmalloc()
    if library is None or "LD_PRELOAD" in os.environ:
        return {}
    # it tells of each tensor above a gigabyte
    return {"LD_PRELOAD": library, "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": str(2**62)}


@cache
def _tcmalloc() -> str | None:
    paths = [Path(folder, name) for folder in _FOLDERS for name in _NAMES]
    return next((str(path) for path in paths if path.is_file()), None)
