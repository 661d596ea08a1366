"""Serve `quiver view` to a browser on this host, by textual-serve.

    serve(["view", "arith/rewards@3"], print)       # prints the address, and ends with Ctrl-C

It is the same application, in a process of its own for each open page. It listens on loopback
alone. Websockets from pages of other sites are refused, since a browser would let them through. The
page fetches nothing from other hosts.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Callable, Sequence

from aiohttp import web
from textual_serve.server import Server

_HOST = "127.0.0.1"


class LocalServer(Server):
    """A server for the pages of this host's own browser."""

    async def on_startup(self, app: web.Application) -> None:
        """Print nothing; the address is printed before."""

    async def handle_index(self, request: web.Request) -> web.Response:
        """Return the page. Its policy keeps the browser from other hosts: the page names a font."""
        response = await super().handle_index(request)
        own = f"'self' ws://{_HOST}:{self.port}"
        policy = f"default-src 'self' 'unsafe-inline' data: blob:; connect-src {own}"
        response.headers["Content-Security-Policy"] = policy
        return response

    async def handle_websocket(self, request: web.Request) -> web.StreamResponse:
        """Start the application for a page of this server."""
        if request.headers.get("Origin") != self.public_url:
            raise web.HTTPForbidden(text="open the address that `quiver view --web` printed")
        return await super().handle_websocket(request)


def serve(words: Sequence[str], on_address: Callable[[str], None]) -> None:
    """Serve `quiver WORDS` on a free port until Ctrl-C.

    Args:
        words: A command of `quiver view`.
        on_address: Called with the address to open.
    """
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-P", "-m", "quiver.flows.cli.main", *words]
    server = LocalServer(shlex.join(command), _HOST, port, title="quiver view")
    on_address(server.public_url)
    server.serve()
