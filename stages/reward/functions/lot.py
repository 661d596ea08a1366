"""A random reward that ignores the answer, for `quiver run --dry-run`.

It has its own module, because each scoring process imports it, and importing Prefect takes seconds.
"""

from __future__ import annotations

import random


def lot(rollout_ids: list[str]) -> list[float]:
    """Return a number between 0 and 1 for each rollout, which depends on its id alone."""
    return [random.Random(name).random() for name in rollout_ids]
