"""State that a stage's process keeps from one call to the next, if its caller asks it to stay.

    is_asked()          # in a stage: True if this process may stay after its answer
    keep(engine)        # keep it for the next call
    take()              # in the next call: take over the kept engine

A process that keeps nothing ends after its answer. A kept engine is put to sleep before the answer
is given, so on a device it holds no more than its context and its graphs.

Not of the spine: the output of a stage does not depend on the process that it runs in.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Closable(Protocol):
    """An object that can be kept."""

    def close(self) -> None:
        """Free its resources. It is not used again."""
        ...


class _Process:
    """State of this process."""

    is_asked = False
    serves_all = False
    sleeper: Closable | None = None


def ask(stay: bool) -> None:
    """Set whether the caller asks this process to stay after the present call."""
    _Process.is_asked = stay


def serve_all() -> None:
    """Make this process stay after each answer that is not an error, for calls of any stage."""
    _Process.serves_all = True


def is_asked() -> bool:
    """Return True if an object kept now will be there for the next call."""
    return _Process.is_asked


def keep(sleeper: Closable) -> None:
    """Keep `sleeper` for the next call."""
    _Process.sleeper = sleeper


def keeps() -> bool:
    """Return True if this process waits for the next call."""
    return _Process.serves_all or _Process.sleeper is not None


def take() -> Any | None:
    """Hand over the kept object, which then belongs to the caller; None if there is none."""
    sleeper = _Process.sleeper
    _Process.sleeper = None
    return sleeper


def close() -> None:
    """Close the kept object, if any; this process then waits for no other call."""
    _Process.serves_all = False
    sleeper = take()
    if sleeper is not None:
        try:
            sleeper.close()
        except Exception as error:  # the process ends anyway, together with all that it started
            log.debug("it could not be closed: %s", error)
