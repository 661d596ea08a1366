"""A proxy before a server of buckets that loses, repeats, delays or refuses requests by a plan.

with Proxy(bucket.endpoint) as proxy:
    os.environ.update(bucket.behind(proxy.url))
    requests = proxy.follow(at(3, DROP_AFTER))
"""

from __future__ import annotations

import http.client
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlsplit


class Action(NamedTuple):
    """What the proxy does with a request, and its seconds or status."""

    name: str
    amount: float = 0


FORWARD = Action("forward")
DROP_BEFORE = Action("drop_before")
"""Close the connection; the server hears nothing."""
DROP_AFTER = Action("drop_after")
"""Let the server do it and close the connection: the answer is lost."""
REPEAT = Action("repeat")
"""Let the server do it twice and give the second answer."""


def delay(seconds: float) -> Action:
    return Action("delay", seconds)


def answer(status: int) -> Action:
    """Answer with `status`; the server hears nothing."""
    return Action("answer", status)


class Request(NamedTuple):
    method: str
    path: str
    action: Action


Plan = Callable[[int, str, str], Action]
"""The action for a request by its number, from 0 on, its method and its path with query."""


def at(number: int, action: Action) -> Plan:
    """The action for one request alone."""
    return lambda index, method, path: action if index == number else FORWARD


def _forward_all(index: int, method: str, path: str) -> Action:
    return FORWARD


class _Answer(NamedTuple):
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


_OF_A_CONNECTION = {"connection", "keep-alive", "transfer-encoding"}


class Proxy(ThreadingHTTPServer):
    """Listens at `url` inside a `with` block and forwards to `endpoint`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.upstream = urlsplit(endpoint).netloc
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self.follow(_forward_all)

    def __enter__(self) -> Proxy:
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()
        with self._lock:
            for open_socket in self._sockets:
                with suppress(OSError):
                    open_socket.shutdown(socket.SHUT_RDWR)

    def follow(self, plan: Plan = _forward_all) -> list[Request]:
        """Follow `plan` and count from 0 again; what is asked from now on fills the list."""
        with self._lock:
            self._plan = plan
            self._requests: list[Request] = []
            return self._requests

    def act(self, method: str, path: str) -> Action:
        with self._lock:
            action = self._plan(len(self._requests), method, path)
            self._requests.append(Request(method, path, action))
            return action

    def process_request(self, request, client_address) -> None:
        with self._lock:
            self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request) -> None:
        with self._lock:
            self._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that went away
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def _handle(self) -> None:
        body = self._body()
        action = self.server.act(self.command, self.path)
        if action.name == "drop_before":
            self.close_connection = True
            return
        if action.name == "answer":
            status = int(action.amount)
            self._send(_Answer(status, http.client.responses[status], [], b""))
            return
        if action.name == "delay":
            time.sleep(action.amount)
        if action.name == "repeat":
            self._ask(body)
        given = self._ask(body)
        if action.name == "drop_after":
            self.close_connection = True
        else:
            self._send(given)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _ask(self, body: bytes) -> _Answer:
        """Ask the server with the client's headers, `Host` among them: they are signed."""
        connection = http.client.HTTPConnection(self.server.upstream, timeout=120)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, text in self.headers.items():
            if name.lower() not in {*_OF_A_CONNECTION, "expect", "content-length"}:
                connection.putheader(name, text)
        if body or self.command in ("PUT", "POST"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        given = _Answer(response.status, response.reason, response.getheaders(), response.read())
        connection.close()
        return given

    def _send(self, given: _Answer) -> None:
        self.send_response_only(given.status, given.reason)
        names = set()
        for name, text in given.headers:
            if name.lower() not in _OF_A_CONNECTION:
                self.send_header(name, text)
                names.add(name.lower())
        if "content-length" not in names and given.status not in (204, 304):
            self.send_header("Content-Length", str(len(given.body)))
        self.end_headers()
        self.wfile.write(given.body)
