"""What can not be shown must not make a run fail: it is said once, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quiver.schemas.errors import printable

log = logging.getLogger("quiver")
_told: set[str] = set()


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Do what is inside; where it fails, log `what` and why, each kind of failure once in a process
    (later ones at level DEBUG)."""
    try:
        yield
    except (
        Exception
    ) as error:  # whatever it is: the version is finished, and this is only a view of it
        level = logging.DEBUG if type(error).__name__ in _told else logging.WARNING
        _told.add(type(error).__name__)
        log.log(
            level,
            "not on Prefect's pages: %s (%s: %s); the run goes on",
            what,
            type(error).__name__,
            printable(error),
        )
