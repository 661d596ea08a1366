"""One persistent connection to a vLLM server: plain JSON, with limits on time and size.

FailedError means that the problem may be temporary: no connection, a reset, a time limit, 408, 409,
425, 429, 5xx other than 501 and 505, or an answer that is no JSON object. Any other status is
RefusedError with the server's own words. Redirects are not followed, and no proxy, cookie or
password of this machine is used.

    wire = Wire("http://host:8000", "", VllmServerOptions())
    models = await wire.ask("GET", "/v1/models", seconds=30)
    await wire.close()
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from contextlib import aclosing
from typing import Any

import httpx

from quiver.schemas.errors import printable
from quiver.stages.common.servers import root_of
from quiver.stages.generate.options import VllmServerOptions

# At DEBUG these loggers write headers, and so tokens.
for _chatty in ("httpx", "httpcore"):
    logging.getLogger(_chatty).setLevel(logging.WARNING)
_MAY_PASS = {408, 409, 425, 429, *range(500, 600)} - {501, 505}
# Bytes of an answer besides its tokens. Parsed JSON may take twenty times as much memory.
_MOST_BYTES = 4 * 2**20
_TOKEN_BYTES = 1024  # for each requested token; most need 100
# Cached because loading the certificates takes longer than many requests.
_tls = functools.cache(httpx.create_ssl_context)


class FailedError(Exception):
    """The server failed in a way that may be temporary or specific to that server."""


class RefusedError(Exception):
    """The server understood the request and refuses it for good."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"answered {status}: {words}")
        self.status = status


class Wire:
    """Sends requests to one server, one at a time."""

    def __init__(self, url: str, token: str, options: VllmServerOptions) -> None:
        self._url = root_of(url)
        self._token = token
        self._options = options
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connection: httpx.AsyncHTTPTransport | None = None
        self.has_reconnected = True
        """True if it has connected since this was set to False: another process may answer now."""

    async def ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float
    ) -> dict[str, Any]:
        """Return the JSON object that the server answers. Raises FailedError or RefusedError."""
        try:
            answer = json.loads(await self.read(method, path, body, seconds=seconds))
        except (ValueError, RecursionError):
            raise FailedError("its answer is no JSON") from None
        if not isinstance(answer, dict):
            raise FailedError(f"its answer is a {type(answer).__name__}, expected an object")
        return answer

    async def read(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, seconds: float
    ) -> bytes:
        """Return the body of a 200 answer. Raises FailedError or RefusedError."""
        content = b"" if body is None else json.dumps(body).encode()
        num_tokens = 0 if body is None else body["sampling_params"]["max_tokens"]
        most_bytes = _MOST_BYTES + _TOKEN_BYTES * num_tokens
        headers = self._headers | ({"Content-Type": "application/json"} if content else {})
        is_kept = self._connection is not None
        try:
            async with asyncio.timeout(seconds):
                try:
                    return await self._send(method, path, headers, content, most_bytes)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    if not is_kept:
                        raise
                # Servers close idle connections, perhaps just now: retry once on a new one.
                await self.close()
                return await self._send(method, path, headers, content, most_bytes)
        except TimeoutError:
            await self.close()
            raise FailedError(f"no whole answer within {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            await self.close()
            words = self._words(str(error).encode())
            raise FailedError(f"{type(error).__name__}: {words}") from None
        except BaseException:  # the rest of this answer must not be read as the next one
            await self.close()
            raise

    async def _send(
        self, method: str, path: str, headers: dict[str, str], content: bytes, most_bytes: int
    ) -> bytes:
        if self._connection is None:
            limits = httpx.Limits(max_connections=1)
            self._connection = httpx.AsyncHTTPTransport(
                verify=_tls(), trust_env=False, limits=limits
            )
        request = httpx.Request(
            method,
            f"{self._url}{path}",
            headers=headers,
            content=content,
            extensions={
                "timeout": {"connect": self._options.connect_seconds},
                "trace": self._trace,
            },
        )
        received = bytearray()
        async with (
            aclosing(await self._connection.handle_async_request(request)) as response,
            aclosing(response.aiter_raw()) as chunks,
        ):
            async for chunk in chunks:
                received += chunk
                if len(received) > most_bytes:
                    raise FailedError(f"its answer has more than {most_bytes} bytes")
        if response.status_code == 200:
            return bytes(received)
        words = self._words(received)
        if response.status_code in _MAY_PASS:
            raise FailedError(f"answered {response.status_code}: {words}")
        raise RefusedError(response.status_code, words)

    async def _trace(self, event: str, _: dict[str, Any]) -> None:
        """Note a new connection: the transport reconnects silently if the server closed an idle
        one."""
        if event == "connection.connect_tcp.started":
            self.has_reconnected = True

    def _words(self, text: bytes | bytearray) -> str:
        """Return the server's error text, without the token."""
        try:
            words = json.loads(text)["error"]
            words = words["message"] if isinstance(words, dict) else words
        except (ValueError, TypeError, KeyError, RecursionError):
            words = text.decode(errors="replace")
        words = str(words).strip()
        if self._token:
            words = words.replace(self._token, "***")
        return printable(words, 300) or "no text"

    async def close(self) -> None:
        """Close the connection; the next request opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()
