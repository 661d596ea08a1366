"""What a command did by hand, told to the Prefect server that PREFECT_API_URL names, in the form of
a flow's events.

So what waits for a version or a tag starts whoever made it. Without PREFECT_API_URL nothing is
told, and nothing of Prefect is imported. A flow leaves its events to a thread of Prefect's, which
may try for minutes and says to nobody whether they arrived; a command ends at once, so it posts
them itself. A server that does not take them costs a warning for each, and `SECONDS` in all.
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
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.store.tags import Entry

SECONDS = 8.0
_RESPITE_SECONDS = 600.0
_failed_at = -math.inf
log = logging.getLogger("quiver")


def tell_version(call: Call, outcome: Outcome) -> None:
    """Tell of each version that the stage wrote; nothing where it was there already. Never
    raises."""
    if not outcome.cached:
        _tell(outcome.ref, lambda events: events.version_events(call, outcome))


def tell_moved(name: str, entry: Entry) -> None:
    """Tell that the tag `name` = run/kind@tag moved. Never raises."""
    _tell(name, lambda events: [events.moved_event(name, entry)])


def _tell(name: str, make: Callable[[ModuleType], list[dict[str, Any]]]) -> None:
    """Post the events that `make` makes of the module `pages.events`; a warning that names `name`
    where the server has not taken them in time."""
    global _failed_at  # noqa: PLW0603
    if not os.environ.get("PREFECT_API_URL"):
        return
    try:
        if time.monotonic() < _failed_at + _RESPITE_SECONDS:
            raise TimeoutError("nor of the one before")
        from .pages import events

        _post(make(events))
    except Exception as error:
        # whatever it is: what was done stands, and the command's answer with it
        _failed_at = time.monotonic()
        log.warning(
            "%s: Prefect's server was not told of it, so no deployment starts by it (%s)",
            name,
            printable(error) or f"no answer within {SECONDS:g} s",
        )


def _post(events: list[dict[str, Any]]) -> None:
    """The server has taken the events when this returns. TimeoutError."""
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

    # a thread, since Prefect's client tries again for as long as a busy server asks it to; it dies
    # with this process
    threading.Thread(target=post, daemon=True, name="events").start()
    answer.result(SECONDS)
