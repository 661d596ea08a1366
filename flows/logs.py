"""What stages say, on Prefect's pages too: lines of the logger `quiver` go to the flow and task run
in which they were said."""

from __future__ import annotations

import logging

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler


class ToServer(APILogHandler):
    """Sends a line with the run that it belongs to; outside of a flow there is none."""

    def emit(self, record: logging.LogRecord) -> None:
        if FlowRunContext.get() is not None:
            super().emit(record)


def attach() -> None:
    """Once a process; a worker's process has set no level of its own."""
    log = logging.getLogger("quiver")
    if not any(isinstance(handler, ToServer) for handler in log.handlers):
        log.addHandler(ToServer())
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
