"""Events for Prefect about versions and tags that a command made outside a flow.

Look here if a deployment does not start after a command. The events are posted to the server that
PREFECT_API_URL names, in the form that flows use, so an automation that waits for a version or a
tag starts in both cases. Without PREFECT_API_URL nothing is posted, and Prefect is not imported.

A flow hands its events to a thread of Prefect's, which may retry for minutes and does not report
failure. A command ends at once, so it posts them itself. A server that does not accept them costs
one warning per event, and at most `SECONDS` in all.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from quiver.schemas.errors import printable
from quiver.stages.common.runtime.call import Call, Outcome
from quiver.stages.common.store.tags import Entry

SECONDS = 8.0
_RESPITE_SECONDS = 600.0
_failed_at = -math.inf
log = logging.getLogger("quiver")


def tell_version(call: Call, outcome: Outcome) -> None:
    """Post an event for each version that the stage wrote; none if it existed already. Never
    raises."""
    if not outcome.cached:
        _tell(outcome.ref, lambda events: events.version_events(call, outcome))


def tell_moved(name: str, entry: Entry) -> None:
    """Post the event that the tag `name` = run/kind@tag moved. Never raises."""
    _tell(name, lambda events: [events.moved_event(name, entry)])


def _tell(name: str, make: Callable[[ModuleType], list[dict[str, Any]]]) -> None:
    """Post the events that `make` builds with the module `pages.events`.

    Logs a warning that names `name` if the server has not taken them in time.
    """
    global _failed_at  # noqa: PLW0603
    if not os.environ.get("PREFECT_API_URL"):
        return
    try:
        if time.monotonic() < _failed_at + _RESPITE_SECONDS:
            raise TimeoutError("nor of the one before")
        from .pages import events

        _post(make(events))
    except Exception as error:
        # Any error: the command's work is done, and its answer must not change.
        _failed_at = time.monotonic()
        log.warning(
            "%s: Prefect's server was not told of it, so no deployment starts by it (%s)",
            name,
            printable(error) or f"no answer within {SECONDS:g} s",
        )


def _post(events: list[dict[str, Any]]) -> None:
    """Post the events and wait until the server has taken them. Raises TimeoutError."""
    from prefect.client.orchestration import get_client
    from prefect.events import Event

    body = [Event(**event).model_dump(mode="json") for event in events]
    answer: Future[None] = Future()

    def post() -> None:
        try:
            with get_client(sync_client=True) as client:
                client.request("POST", "/events", json=body)
            answer.set_result(None)
        except Exception as error:
            answer.set_exception(error)

    # In a thread, because Prefect's client retries for as long as a busy server asks it to. The
    # thread dies with this process.
    threading.Thread(target=post, daemon=True, name="events").start()
    answer.result(SECONDS)
