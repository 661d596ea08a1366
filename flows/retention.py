"""[retention]: a run cleans up after itself, by the rules of `quiver gc`.

It does so after each iteration and at its end, in its own versions, its evaluations' and its moving
reference's. What goes wrong with that is a warning, and never the run's error.

Not of the spine: a run does the same with and without it, and keeps more.
"""

from __future__ import annotations

import logging
from contextlib import suppress

from pydantic import Field

from quiver.schemas.errors import CorruptError, QuiverError, unexpected
from quiver.stages.common.config import Config
from quiver.stages.common.store import Store
from quiver.stages.common.store.collection import Rule, collect
from quiver.stages.report.words import counted

from .sections import SIDE_RUNS

log = logging.getLogger("quiver")


class Retention(Config):
    """What the run keeps of what it made. Left out: everything, and nothing is cleaned up."""

    keep: int | None = Field(None, ge=1)
    """How many versions of each kind stay, with what they were made of. None: all."""
    moments: int | None = Field(None, ge=1)
    """Of how many of the newest policies the optimizer state stays. None: of all that stay. A
    policy without it can be sampled and measured; to train on from it asks for
    `optimize.load_optimizer = false`."""
    grace_hours: float = Field(24, ge=0)
    """How long what goes lies in the trash, from where `quiver gc --restore` brings it back. 0: it
    is deleted at once."""


def clean_up(path: str, run: str, retention: Retention, policy: str | None = None) -> None:
    """Clean up `run` in the store at `path`. Never raises.

    `policy`, which the run goes on from, and what was trained from it stay with their optimizer
    states, however many were trained by hand beside them. So a finished run that is gone through
    again keeps what its later iterations made.
    """
    if retention.keep is None and retention.moments is None:
        return
    runs = (run, *(run + ending for ending in SIDE_RUNS))
    spared = set() if policy is None else {policy}
    try:
        store = Store(path, create=False)
        for version in store.versions(run, "policy"):  # by number: parents first
            with suppress(CorruptError):  # which is not the question here
                parent = version.manifest.input("policy")
                if parent is not None and parent.ref in spared:
                    spared.add(str(version.ref))
        seconds = retention.grace_hours * 3600
        rule = Rule(retention.keep, retention.moments, seconds, runs, tuple(spared))
        collected = collect(store, rule, apply=True)
        if not retention.grace_hours:  # the next one deletes what this one took
            collected.deleted_bytes += collect(store, rule, apply=True).deleted_bytes
    except Exception as error:  # any: what the run made is there
        typed = error if isinstance(error, QuiverError) else unexpected("retention", error)
        message = "%-22s %s %s: %s; the run goes on"
        log.warning(message, "retention", typed.code, typed.object, typed.message)
        return
    taken = [*collected.versions, *collected.optimizer]
    if taken or collected.deleted_bytes:
        log.info(
            "%-22s %s and %s to the trash, %.2f GB; %.2f GB deleted",
            "retention",
            counted(len(collected.versions), "version"),
            counted(len(collected.optimizer), "optimizer state"),
            sum(candidate.bytes for candidate in taken) / 1e9,
            collected.deleted_bytes / 1e9,
        )
