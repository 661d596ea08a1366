"""Which of a launcher's ranks this process is, for commands that `torchrun` starts.

Not of the spine: without a launcher nothing here has an effect.
"""

from __future__ import annotations

import os

_LAUNCHERS = ("WORLD_SIZE", "ACCELERATE_NUM_PROCESSES")
"""Variables of launchers, as in `stages.common.ranks`, which takes longer to import."""


def is_led() -> bool:
    """Return True if a launcher started this process as a rank beside rank 0, which speaks for all.

    A RANK that something else left in the environment counts for nothing.
    """
    is_launched = any(os.environ.get(name) for name in _LAUNCHERS)
    return is_launched and (os.environ.get("RANK") or "0") != "0"
