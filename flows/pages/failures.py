"""Error handling for Prefect's pages: a view that fails is logged once, and the run continues."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quiver.schemas.errors import printable

log = logging.getLogger("quiver")
_seen_failures: set[str] = set()


@contextmanager
def attempt(action: str) -> Iterator[None]:
    """Run the block; if it fails, log `action` and the error.

    Each type of error is logged once per process as a warning, later ones at level DEBUG.
    """
    try:
        yield
    except Exception as error:  # Any error: the version is finished, and this is only a view of it.
        failure = type(error).__name__
        level = logging.DEBUG if failure in _seen_failures else logging.WARNING
        _seen_failures.add(failure)
        message = "not on Prefect's pages: %s (%s: %s); the run goes on"
        log.log(level, message, action, failure, printable(error))
