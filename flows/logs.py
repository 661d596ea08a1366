"""What stages say, on Prefect's pages too: lines of the logger `quiver` go to the flow and task run
in which they were said. Importing this module sees to it, once a process."""

from __future__ import annotations

import logging

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

_log = logging.getLogger("quiver")
_to_server = APILogHandler()
_to_server.addFilter(lambda line: FlowRunContext.get() is not None)  # else a line has no run
_log.addHandler(_to_server)
if _log.level == logging.NOTSET:  # a worker's process has set none of its own
    _log.setLevel(logging.INFO)
