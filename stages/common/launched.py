"""Whether a launcher such as `torchrun` started this process, and as which rank.

Commands ask it before anything heavy is imported.
Not of the spine: without a launcher nothing here has an effect.
"""

from __future__ import annotations

import os

VARIABLES = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES")
"""Environment variables of launchers. If one is set, the ranks were started already."""


def are_launched() -> bool:
    """Return True if a launcher started this process as one of several ranks."""
    return any(os.environ.get(name) for name in VARIABLES)


def is_led() -> bool:
    """Return True if a launcher started this process as a rank beside rank 0, which speaks for all.

    A RANK that something else left in the environment counts for nothing.
    """
    return are_launched() and (os.environ.get("RANK") or "0") != "0"
