"""What the process of a stage keeps from one call for the next, where its caller asks it to stay.

    is_asked()          # in a stage: whether this process may stay behind its answer
    keep(engine)        # what it stays for
    take()              # by the next call: what was kept, which is its own from now on

A process that keeps nothing ends with its answer, as every other. What is kept was put to sleep
before the answer was given: on a device it has no more than its context and its graphs.

Not of the spine: what a stage makes does not depend on the process that it runs in.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Closable(Protocol):
    """What may be kept."""

    def close(self) -> None:
        """Free what it holds; it is not used again."""
        ...


class _Process:
    """This process, as its caller wants it."""

    is_asked = False
    serves_all = False
    sleeper: Closable | None = None


def ask(stay: bool) -> None:
    """Say whether the caller asks this process to stay behind the answer to its present call."""
    _Process.is_asked = stay


def serve_all() -> None:
    """Have this process stay behind each answer that is no error, for calls of any stage."""
    _Process.serves_all = True


def is_asked() -> bool:
    """Whether what a stage keeps now is there for the next call."""
    return _Process.is_asked


def keep(sleeper: Closable) -> None:
    """Have `sleeper` for the next call."""
    _Process.sleeper = sleeper


def keeps() -> bool:
    """Whether this process waits for the next call."""
    return _Process.serves_all or _Process.sleeper is not None


def take() -> Any | None:
    """What was kept, the caller's from now on; None where nothing was."""
    sleeper = _Process.sleeper
    _Process.sleeper = None
    return sleeper


def close() -> None:
    """Close what was kept and nobody took; this process waits for no other call."""
    _Process.serves_all = False
    sleeper = take()
    if sleeper is not None:
        try:
            sleeper.close()
        except Exception as error:  # the process ends, and all that it started with it
            log.debug("it could not be closed: %s", error)
