"""A reward that says nothing of an answer, for a run that is only tried (`quiver run --dry-run`).

In a module of its own, since each process that scores imports it, and Prefect would cost seconds.
"""

from __future__ import annotations

import random


def lot(rollout_ids: list[str]) -> list[float]:
    """Return a number between 0 and 1 for each rollout, which depends on its id alone."""
    return [random.Random(name).random() for name in rollout_ids]
