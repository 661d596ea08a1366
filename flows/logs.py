"""Log lines of stages on Prefect's pages: the logger `quiver` also writes to the current run.

Importing this module installs the handler, once per process.
"""

from __future__ import annotations

import logging

from prefect.context import FlowRunContext
from prefect.logging.handlers import APILogHandler

_log = logging.getLogger("quiver")
_to_server = APILogHandler()
# Outside a flow run, a line belongs to no run.
_to_server.addFilter(lambda line: FlowRunContext.get() is not None)
_log.addHandler(_to_server)
if _log.level == logging.NOTSET:  # A worker's process has not set a level.
    _log.setLevel(logging.INFO)
