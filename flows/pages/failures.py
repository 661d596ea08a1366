"""What cannot be shown must not make a run fail: it is said once, and the run goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from quiver.schemas.errors import printable

log = logging.getLogger("quiver")
_seen_failures: set[str] = set()


@contextmanager
def attempt(action: str) -> Iterator[None]:
    """Do what is inside; where it fails, log `action` and why, each kind of failure once in a
    process (later ones at level DEBUG)."""
    try:
        yield
    except Exception as error:  # any: the version is finished, and this is only a view of it
        failure = type(error).__name__
        level = logging.DEBUG if failure in _seen_failures else logging.WARNING
        _seen_failures.add(failure)
        message = "not on Prefect's pages: %s (%s: %s); the run goes on"
        log.log(level, message, action, failure, printable(error))
