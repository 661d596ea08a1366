"""[retention]: a run cleans up after itself, by the rules of `quiver gc`.

It does so after each iteration and at its end, in its own versions, its evaluations and its moving
reference. An error there is a warning, and never the run's error.

Not of the spine: without it, a run makes the same versions and keeps more of them.
"""

from __future__ import annotations

import logging
from collections import Counter

from pydantic import Field

from quiver.flows.look.words import counted
from quiver.schemas.errors import QuiverError, unexpected
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import EXPIRED, NO_OPTIMIZER, is_of_sweep
from quiver.stages.core.store.retention import Rule, collect

from .sections import SIDE_RUNS

log = logging.getLogger("quiver")


class Retention(Config):
    """Which of its versions the run keeps. Default: all; nothing is cleaned up."""

    keep: int | None = Field(None, ge=1)
    """Number of versions of each kind to keep, together with their inputs. What the run's sweeps
    made is counted apart. Default: all."""
    moments: int | None = Field(None, ge=1)
    """Number of newest policies whose optimizer state is kept. Default: every kept policy's. A
    policy without it can be sampled and measured; training it further needs
    `optimize.load_optimizer = false`."""
    grace_hours: float = Field(24, ge=0)
    """Hours between the time when files expire and the time when they are deleted, for processes
    that still read them. 0: they are deleted at once."""


def clean_up(path: str, run: str, retention: Retention, policy: str | None = None) -> None:
    """Clean up `run` in the store at `path`. Never raises.

    `policy`, from which the run continues, and the policies trained from it keep their optimizer
    states, even if newer ones were trained by hand. So a finished run that is run again keeps what
    its later iterations made, but not each cell of a sweep that started from it.
    """
    if retention.keep is None and retention.moments is None:
        return
    runs = (run, *(run + ending for ending in SIDE_RUNS))
    spared = set() if policy is None else {policy}
    try:
        store = Store(path, create=False)
        for ref, summary in store.summaries(run, "policy"):  # By number, so parents come first.
            if summary.trained_from in spared and not is_of_sweep(summary.note):
                spared.add(str(ref))
        seconds = retention.grace_hours * 3600
        rule = Rule(retention.keep, retention.moments, seconds, runs, tuple(spared))
        collected = collect(store, rule, apply=True)
    except Exception as error:  # Any error: the run's versions exist.
        typed = error if isinstance(error, QuiverError) else unexpected("retention", error)
        message = "%-22s %s %s: %s; the run continues"
        log.warning(message, "retention", typed.code, typed.object, typed.message)
        return
    if collected.marked or collected.deleted:
        kinds = Counter(expiring.mark for expiring in collected.marked)
        log.info(
            "%-22s %s and %s expired, %.2f GB; %.2f GB deleted",
            "retention",
            counted(kinds[EXPIRED], "version"),
            counted(kinds[NO_OPTIMIZER], "optimizer state"),
            sum(expiring.bytes for expiring in collected.marked) / 1e9,
            sum(expiring.bytes for expiring in collected.deleted) / 1e9,
        )
