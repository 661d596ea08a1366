"""Requests to servers that others run: the HTTP client of engines, reward servers, judges and
sandboxes, with limits on time and size.

    client = Client(token="", connect_seconds=5)
    models = await client.ask("http://host:8000/v1/models", seconds=30, most_bytes=2**20)
    await client.close()

* One time limit covers the whole answer, so a server that trickles gains nothing.
* Bodies are read as they are sent, up to a size. Compressed ones are refused, so that none expands
  in memory. A token in a body is removed before any other code sees it.
* Redirects are not followed, and no proxy, cookie or password of this machine is used.
* A server or proxy may send one response too many. On a kept connection each later request would
  then get the answer to the one before. So a connection is kept only after a good answer.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing, suppress
from typing import TypeVar

import httpx

from quiver.schemas.errors import printable

from .servers import MalformedError, read_json

for _chatty in ("httpx", "httpcore"):  # they log a line per request, and headers at DEBUG
    logging.getLogger(_chatty).setLevel(logging.WARNING)
_T = TypeVar("_T")
_MAY_PASS = {408, 409, 425, 429, *range(500, 600)} - {501, 505}
_REFUSAL_BYTES = 8192  # read of a refusal, to show its beginning
_REFUSAL_SECONDS = 1.0  # for reading it
# made once: loading the certificates takes longer than many requests
_tls = functools.cache(httpx.create_ssl_context)


class FailedError(Exception):
    """A request got no good answer."""

    def __init__(
        self, cause: str, status: int = 0, *, is_final: bool = False, after: float = 0.0
    ) -> None:
        super().__init__(cause)
        self.status = status
        """The answer's status; 0 if no whole answer came."""
        self.is_final = is_final
        """True if a later attempt would fail in the same way."""
        self.after = after
        """Seconds until the server wants to be asked again."""


class Client:
    """Sends requests, one at a time, over one connection per host."""

    def __init__(
        self, token: str, connect_seconds: float, *, keeps_connections: bool = True
    ) -> None:
        """Connect when the first request is sent.

        Args:
            token: Sent as bearer token, unless empty.
            connect_seconds: Longest wait for a connection.
            keeps_connections: If false, each request has its own connection. A dialect that does
                not name its rows needs that, because a shifted answer would look right.
        """
        self._token = token
        self._timeouts = {"connect": connect_seconds}
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._keeps_connections = keeps_connections
        if not keeps_connections:
            self._headers["Connection"] = "close"
        # This is the layer below httpx's client. It has no cookies, redirects or environment.
        self._connections: httpx.AsyncHTTPTransport | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ask(
        self,
        url: str | httpx.URL,
        body: bytes | None = None,
        read: Callable[[bytes], _T] = read_json,
        *,
        seconds: float,
        most_bytes: int,
        headers: Mapping[str, str] | None = None,
    ) -> _T:
        """Return what `read` makes of the answer: to a POST of `body`, a JSON text, or to a GET.

        Raises FailedError, also if `read` raises MalformedError.
        """
        method = "POST" if body is not None else "GET"
        sent_headers = {**self._headers, **(headers or {})}
        if body is not None:
            sent_headers["Content-Type"] = "application/json"
        timeouts = {"timeout": self._timeouts}
        is_kept = False
        try:
            request = httpx.Request(
                method, url, headers=sent_headers, content=body, extensions=timeouts
            )
            async with asyncio.timeout(seconds):
                answer = read(await self._send(request, most_bytes))
            is_kept = self._keeps_connections
            return answer
        except MalformedError as error:
            raise FailedError(str(error), httpx.codes.OK) from None
        except TimeoutError:
            raise FailedError(f"no whole answer within {seconds:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise FailedError("its certificate is not trusted", is_final=True) from None
            cause = f"{type(error).__name__}: {printable(self.hide(str(error)), 120)}"
            raise FailedError(cause) from None
        finally:
            if not is_kept:
                await self.close()

    async def _send(self, request: httpx.Request, most_bytes: int) -> bytes:
        """Return the body of a good answer."""
        if self._connections is None:
            self._connections = httpx.AsyncHTTPTransport(verify=_tls(), trust_env=False)
        async with aclosing(await self._connections.handle_async_request(request)) as response:
            status = response.status_code
            if 300 <= status < 400:
                cause = f"answered {status}: a redirect is not followed; name the final address"
                raise FailedError(cause, status, is_final=True)
            if not response.is_success:
                beginning = bytearray()
                # the status decides; its text only helps people
                with suppress(TimeoutError, httpx.HTTPError):
                    async with asyncio.timeout(_REFUSAL_SECONDS):
                        async for chunk in response.aiter_raw():
                            beginning += chunk
                            if len(beginning) >= _REFUSAL_BYTES:
                                break
                text = beginning.decode(errors="replace")
                with suppress(ValueError, TypeError, KeyError, RecursionError):
                    text = json.loads(text)["error"]["message"]
                shown = printable(self.hide(str(text)).strip(), 300)
                raise FailedError(
                    f"answered {status}: {shown or 'no text'}",
                    status,
                    is_final=status not in _MAY_PASS,
                    after=_retry_after(response.headers.get("retry-after", "")),
                )
            encoding = response.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise FailedError("the answer is compressed, which was not asked for", status)
            received = bytearray()
            async for chunk in response.aiter_raw():
                received += chunk
                if len(received) > most_bytes:
                    raise FailedError(f"the answer has more than {most_bytes} bytes", status)
        return bytes(received.replace(self._token.encode(), b"***") if self._token else received)

    def hide(self, text: str) -> str:
        """Return `text` without the token. Call it before the text is shown or cut."""
        return text.replace(self._token, "***") if self._token else text

    async def close(self) -> None:
        """Close every connection; the next request opens another."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.aclose()


def _retry_after(text: str) -> float:
    """Return the seconds that a Retry-After header asks for, as a number or a date; 0 if it cannot
    be read."""
    text = text.strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
