"""Connections to the reward server, with a time limit for each request. Look here for what guards
the server against slow clients.

uvicorn does not limit the time of headers that never end, or of a body whose request was already
refused. A client that sends those would keep a connection for ever. The bytes of incomplete headers
are limited by h11.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

GRACE_SECONDS = 5.0
"""Seconds that the connection waits for a body beyond the application's limit, so that the
application answers first."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class Connection(H11Protocol):
    """One connection. The application's `state.limits` gives the number of connections and the
    seconds for headers and bodies."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = self.config.app.state.limits
        self._awaited: Any = None
        """The next part of a request: h11.IDLE for headers, h11.SEND_BODY for a body."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(error)

    def _watch(self) -> None:
        """Start the timer of the part of a request that comes next."""
        if self.conn.their_state is self._awaited:
            return  # its timer runs already; further bytes do not extend it
        self._awaited = self.conn.their_state
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = {
            h11.IDLE: self._limits.header_seconds,
            h11.SEND_BODY: self._limits.body_seconds + GRACE_SECONDS,
        }
        if self._awaited in seconds:
            self._timer = self.loop.call_later(seconds[self._awaited], self.transport.abort)
