"""One request to one of several hosts until it is answered, refused, or out of time: what may go
wrong on a wire, in one place.

* Deadlines: for connecting, for one whole answer (so a server that trickles gains nothing), for the
  request with its retries.
* Retries, with exponential back-off and full jitter, for what may pass: no connection, resets,
  time-outs, answers that are not of the dialect, 408, 409, 425, 429 and 5xx. Retry-After is kept; a
  429 costs time, not a retry.
* What can not pass ends everything at once with RemoteError: redirects (never followed), 401, 403,
  404, 422 and their like. 400 and 413 are about the rows asked: RefusedError.
* A host that fails several times in a row rests; after a while one request tries it, and the others
  wait for how that ends.
* Bodies are read as they are sent, up to a size; a compressed one is refused, so none unfolds into
  memory. Where one repeats the token, the token is taken out before anything else sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import logging
import random
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import httpx

from quiver.schemas.errors import ConfigError, RemoteError, printable

from .dialects.strict import MalformedError

if TYPE_CHECKING:
    from .config import ServerConfig

log = logging.getLogger(__name__)
for _chatty in (
    "httpx",
    "httpcore",
):  # a line a request, and at DEBUG the headers that servers send
    logging.getLogger(_chatty).setLevel(logging.WARNING)
_T = TypeVar("_T")
_PASSING = {408, 409, 425, 429, *range(500, 600)} - {501, 505}
_ABOUT_ROWS = {400, 413}
_LONGEST_PAUSE = 30.0  # seconds of back-off
_POLL = 0.05  # seconds between looks at resting hosts
_TOLD, _TELLING = (
    2000,
    1.0,
)  # bytes of a refusal that are read to show its beginning, and seconds that this may take


class RefusedError(Exception):
    """The server says that it can not take these rows."""


class ExhaustedError(Exception):
    """No answer in the retries and the time allowed; the message is the last cause. `answered`: it
    was given by a server."""

    def __init__(self, cause: str, answered: bool) -> None:
        super().__init__(cause)
        self.answered = answered


class _FailedError(Exception):
    """An attempt failed in a way that may pass. `after`: seconds until the server wants to be asked
    again."""

    def __init__(
        self, cause: str, *, after: float | None = None, busy: bool = False, answered: bool = True
    ) -> None:
        super().__init__(cause)
        self.after, self.busy, self.answered = after, busy, answered


@dataclass
class Host:
    """One URL, and how it has been doing."""

    url: httpx.URL
    failures: int = 0
    """In a row."""
    rest_until: float = 0.0
    """Monotonic seconds: it failed too often."""
    busy_until: float = 0.0
    """Monotonic seconds: it asked for that time itself."""

    @property
    def free_at(self) -> float:
        """When it may be asked again."""
        return max(self.rest_until, self.busy_until)


@dataclass
class Hosts:
    """Takes hosts in turn, leaves out those that rest, and keeps the pace between requests."""

    config: ServerConfig
    all: list[Host] = field(default_factory=list)
    turn: int = 0
    next_slot: float = 0.0

    @property
    def working(self) -> bool:
        """Whether some host has not failed too often."""
        return any(host.failures < self.config.breaker_failures for host in self.all)

    async def pace(self) -> None:
        """Wait for a place in the rate that the recipe allows."""
        if self.config.requests_per_second:
            now = time.monotonic()
            slot = max(now, self.next_slot)
            self.next_slot = slot + 1 / self.config.requests_per_second
            await asyncio.sleep(slot - now)

    async def take(self, deadline: float) -> Host | None:
        """The next host that does not rest, waited for; None when none will be there before
        `deadline`."""
        while True:
            now = time.monotonic()
            for _ in self.all:
                host = self.all[self.turn % len(self.all)]
                self.turn += 1
                if host.free_at <= now:
                    if host.failures >= self.config.breaker_failures:
                        host.rest_until = (
                            now + self.config.breaker_seconds
                        )  # this request tries it, for all
                    return host
            wake = min(host.free_at for host in self.all)
            if wake >= deadline:
                return None
            await asyncio.sleep(min(wake - now, _POLL))

    def worked(self, host: Host) -> None:
        """A good answer: nothing is held against the host."""
        host.failures, host.rest_until = 0, 0.0

    def failed(self, host: Host, failure: _FailedError) -> None:
        """One more failure in a row; a busy server only asked for time."""
        now = time.monotonic()
        host.busy_until = max(host.busy_until, now + (failure.after or 0.0))
        if failure.busy:
            return
        host.failures += 1
        if host.failures == self.config.breaker_failures:
            log.warning(
                "reward server %s: %s failed %d times in a row and rests",
                self.config.name,
                host.url,
                host.failures,
            )
        if host.failures >= self.config.breaker_failures:
            host.rest_until = now + self.config.breaker_seconds


class Transport:
    """Sends bodies to the hosts of one server section; the state of the hosts outlives an event
    loop."""

    def __init__(self, config: ServerConfig, urls: list[str], token: str) -> None:
        """ConfigError: a URL that no request can have."""
        self.config = config
        try:
            self.hosts = Hosts(
                config, [Host(found) for url in urls if (found := httpx.URL(url)).host]
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"reward server {config.name}", f"urls: {printable(error)}", next="correct the URL"
            ) from None
        self._headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        self._token = token
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._random = random.Random()

    def connection(self) -> httpx.AsyncHTTPTransport:
        """Connections for one worker, one a host: a pool shared by many workers spends most of its
        time on itself.

        The layer below httpx's client: it knows no cookies, redirects, proxies or environment, so
        none has to be turned off.
        """
        return httpx.AsyncHTTPTransport(
            verify=_tls(), trust_env=False, limits=httpx.Limits(max_connections=len(self.hosts.all))
        )

    def hide(self, text: str) -> str:
        """`text` without the token, before anyone sees or cuts it."""
        return text.replace(self._token, "***") if self._token else text

    async def ask(
        self,
        connection: httpx.AsyncHTTPTransport,
        body: bytes,
        key: str,
        read: Callable[[bytes], _T],
        deadline: float | None = None,
    ) -> _T:
        """What `read` makes of the answer to `body`, which any number of attempts send under the
        same idempotency `key`.

        RefusedError, ExhaustedError; RemoteError where asking on is useless. `read` may raise
        MalformedError. `deadline`: in monotonic seconds, by default `total_seconds` after the first
        attempt got its place.
        """
        failure, tries, waits = _FailedError("no host was free in time", answered=False), 0, 0
        while True:
            await self.hosts.pace()
            deadline = deadline or time.monotonic() + self.config.total_seconds
            host = await self.hosts.take(deadline)
            if host is None:
                raise ExhaustedError(f"{failure} (all hosts rest)", failure.answered)
            try:
                answer = read(await self._attempt(connection, host, body, key, deadline))
                self.hosts.worked(host)
                return answer
            except RefusedError:
                self.hosts.worked(host)
                raise
            except MalformedError as error:
                failure = _FailedError(
                    f"the answer {error}" if str(error).startswith("is ") else str(error)
                )
            except _FailedError as error:
                failure = error
            self.hosts.failed(host, failure)
            tries, waits = tries + (not failure.busy), waits + 1
            pause = self._random.uniform(
                0, min(_LONGEST_PAUSE, self.config.backoff_seconds * 2 ** min(waits - 1, 20))
            )
            if tries > self.config.retries or time.monotonic() + pause >= deadline:
                raise ExhaustedError(f"{failure} ({waits} attempts)", failure.answered)
            await asyncio.sleep(pause)

    async def _attempt(
        self,
        connection: httpx.AsyncHTTPTransport,
        host: Host,
        body: bytes,
        key: str,
        deadline: float,
    ) -> bytes:
        """The body of one good answer, within the time for one."""
        seconds = max(0.0, min(self.config.read_seconds, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(seconds):
                return await self._exchange(connection, host, body, key)
        except TimeoutError:
            raise _FailedError(f"no whole answer within {seconds:g} s", answered=False) from None
        except RemoteError:  # an OSError too, and the one that is final
            raise
        except (httpx.HTTPError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise self._fatal(
                    host, "its certificate is not trusted", "correct the server's certificate"
                ) from None
            raise _FailedError(
                f"{type(error).__name__}: {printable(self.hide(str(error)), 120)}", answered=False
            ) from None

    async def _exchange(
        self, connection: httpx.AsyncHTTPTransport, host: Host, body: bytes, key: str
    ) -> bytes:
        headers = {**self._headers, "Idempotency-Key": key}
        timeouts = {"timeout": {"connect": self.config.connect_seconds}}
        request = httpx.Request(
            "POST", host.url, headers=headers, content=body, extensions=timeouts
        )
        response = await connection.handle_async_request(request)
        try:
            if not response.is_success:
                raise await self._status(host, response)
            encoding = response.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ("", "identity"):
                raise _FailedError("the answer is compressed, which was not asked for")
            return await self._body(response)
        finally:
            await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        declared, limit = response.headers.get("content-length", ""), self.config.max_bytes
        if declared.isdecimal() and int(declared) > limit:
            raise _FailedError(f"the answer has {declared} bytes, more than max_bytes = {limit}")
        found = bytearray()
        async for chunk in response.aiter_raw():
            found += chunk
            if len(found) > limit:
                raise _FailedError(f"the answer has more than max_bytes = {limit} bytes")
        return bytes(found.replace(self._token.encode(), b"***") if self._token else found)

    async def _status(self, host: Host, response: httpx.Response) -> Exception:
        status = response.status_code
        if response.has_redirect_location or 300 <= status < 400:
            return self._fatal(
                host,
                f"answered {status}: a redirect is not followed",
                "name the final address in urls",
            )
        told = bytearray()
        with contextlib.suppress(
            TimeoutError, httpx.HTTPError
        ):  # the status says what to do; its text only helps people
            async with asyncio.timeout(_TELLING):
                async for chunk in response.aiter_raw():
                    told += chunk
                    if len(told) >= _TOLD:
                        break
        text = self.hide(told.decode(errors="replace")).strip()
        cause = f"answered {status}: {printable(text, 120) or 'no text'}"
        if status in _PASSING:
            return _FailedError(
                cause,
                after=_retry_after(response.headers.get("retry-after", "")),
                busy=status == 429,
            )
        if status in _ABOUT_ROWS:
            return RefusedError(cause)
        help = {
            401: "correct the token",
            403: "correct the token",
            404: "correct the path in urls, or model",
        }
        return self._fatal(
            host,
            cause,
            help.get(status, "correct the server's section in the recipe, or the server"),
        )

    def _fatal(self, host: Host, cause: str, next: str) -> RemoteError:
        return RemoteError(
            f"reward server {self.config.name}",
            f"{host.url}: {cause}",
            state="finished shards are kept.",
            next=next,
        )


@functools.cache
def _tls() -> ssl.SSLContext:
    """Made once: loading the certificates takes longer than many requests."""
    return httpx.create_ssl_context()


def _retry_after(text: str) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or a date; None where it says nothing
    that can be read."""
    text = text.strip()
    if text.isdecimal():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None
