"""Send one request to one of several hosts until it is answered, refused, or out of time. Look here
for everything that can go wrong on the network.

* Deadlines: for connecting, for one whole answer (so a server that trickles gains nothing), and for
  the request with its retries.
* Retries, with exponential back-off and full jitter, for failures that may be temporary: no
  connection, resets, time-outs, answers that break the dialect, 408, 409, 425, 429 and 5xx (not 501
  and 505). Retry-After is respected; a 429 costs time, not a retry.
* Permanent failures end everything at once with RemoteError: redirects (never followed), 401, 403,
  404, 422 and similar ones. 400 and 413 concern the rows of the request.
* A host that fails several times in a row rests. After a while one request tries it, and the others
  wait for its result.
* Bodies are read as they are sent, up to a size. Compressed ones are refused, so that none expands
  in memory. A token in a body is removed before any other code sees it.
* A server or proxy may send one response too many. On a kept connection each later request would
  then get the answer to the one before. So a connection is kept only if answers name their rows,
  and not after a wrong one.
"""

from __future__ import annotations

import asyncio
import email.utils
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import httpx

from quiver.schemas.errors import ConfigError, RemoteError, printable

from .dialects.strict import MalformedError

if TYPE_CHECKING:
    from .config import ServerConfig

log = logging.getLogger(__name__)
for _chatty in ("httpx", "httpcore"):  # they log a line per request, and headers at DEBUG
    logging.getLogger(_chatty).setLevel(logging.WARNING)
_T = TypeVar("_T")
_MAY_PASS = {408, 409, 425, 429, *range(500, 600)} - {501, 505}
_ABOUT_ROWS = {400, 413}
_LONGEST_PAUSE = 30.0  # seconds of back-off
_POLL_SECONDS = 0.05  # between checks of resting hosts
_REFUSAL_BYTES = 2000  # read of a refusal, to show its beginning
_REFUSAL_SECONDS = 1.0  # for reading it
# made once: loading the certificates takes longer than many requests
_tls = functools.cache(httpx.create_ssl_context)


@dataclass(eq=False)
class FailedError(Exception):
    """A request, or one attempt at it, failed. A later one, or one for other rows, may succeed."""

    cause: str
    """Reason of the last failure."""
    is_refused: bool = False
    """True if the server says that it cannot take these rows."""
    is_answered: bool = True
    """True if a server answered, and the cause is in its answer."""
    after: float = 0.0
    """Seconds until the server wants to be asked again."""
    is_busy: bool = False
    """True if the server only asked for time."""

    def __str__(self) -> str:
        return self.cause


@dataclass
class Host:
    """One URL and its recent failures. Times are in monotonic seconds."""

    url: httpx.URL
    failures: int = 0
    """Failures in a row."""
    rest_until: float = 0.0
    """End of its rest after too many failures."""
    busy_until: float = 0.0
    """End of the time that the host itself asked for."""

    @property
    def free_at(self) -> float:
        """Time from which it may be asked again."""
        return max(self.rest_until, self.busy_until)

    def reset(self) -> None:
        """Forget all failures: the host works."""
        self.failures = 0
        self.rest_until = 0.0


class Transport:
    """Sends bodies to the hosts of one server section. The state of the hosts outlives an event
    loop."""

    def __init__(
        self, config: ServerConfig, urls: list[str], token: str, *, keeps_connections: bool = False
    ) -> None:
        """Raises ConfigError if a URL is invalid.

        Args:
            keeps_connections: If true, a connection is kept for the next request; else each request
                has its own.
        """
        self.config = config
        try:
            self._hosts = [Host(url) for url in map(httpx.URL, urls) if url.host]
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
        self._keeps_connections = keeps_connections
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._turns = itertools.cycle(self._hosts)
        self._next_slot = 0.0

    @property
    def has_working_host(self) -> bool:
        """True if some host has not failed too often."""
        return any(host.failures < self.config.breaker_failures for host in self._hosts)

    def connection(self) -> httpx.AsyncHTTPTransport:
        """Return connections for one worker, one per host. A pool shared by many workers would
        spend most of its time on itself.

        This is the layer below httpx's client. It has no cookies, redirects, proxies or
        environment, so none has to be turned off.
        """
        limits = httpx.Limits(max_connections=len(self._hosts))
        return httpx.AsyncHTTPTransport(verify=_tls(), trust_env=False, limits=limits)

    def hide(self, text: str) -> str:
        """Return `text` without the token. Call it before the text is shown or cut."""
        return text.replace(self._token, "***") if self._token else text

    async def ask(
        self,
        connection: httpx.AsyncHTTPTransport,
        body: bytes,
        key: str,
        read: Callable[[bytes], _T],
        deadline: float | None = None,
    ) -> _T:
        """Send `body` and return what `read` makes of the answer.

        Args:
            key: Idempotency key, the same in every attempt.
            read: May raise MalformedError, which counts as a failed attempt.
            deadline: In monotonic seconds. Default: `total_seconds` after the first attempt got its
                place in the rate limit.

        Raises:
            FailedError: The rows are refused, or no good answer came within the retries and the
                time.
            RemoteError: Further requests are useless.
        """
        failure = FailedError("no host was free in time", is_answered=False)
        failures = 0
        attempts = 0
        while True:
            await self._wait_for_slot()
            deadline = deadline or time.monotonic() + self.config.total_seconds
            host = await self._take_host(deadline)
            if host is None:
                raise replace(failure, cause=f"{failure} (all hosts rest)")
            headers = {**self._headers, "Idempotency-Key": key}
            if attempts or not self._keeps_connections:
                headers["Connection"] = "close"
            timeouts = {"timeout": {"connect": self.config.connect_seconds}}
            request = httpx.Request(
                "POST", host.url, headers=headers, content=body, extensions=timeouts
            )
            try:
                answer = read(await self._attempt(connection, request, deadline))
                host.reset()
                return answer
            except MalformedError as error:
                text = str(error)
                failure = FailedError(f"the answer {text}" if text.startswith("is ") else text)
            except FailedError as error:
                if error.is_refused:
                    host.reset()
                    raise
                failure = error
            self._note_failure(host, failure)
            failures += not failure.is_busy
            longest = self.config.backoff_seconds * 2 ** min(attempts, 20)
            attempts += 1
            pause = random.uniform(0, min(_LONGEST_PAUSE, longest))
            if failures > self.config.retries or time.monotonic() + pause >= deadline:
                raise replace(failure, cause=f"{failure} ({attempts} attempts)")
            await asyncio.sleep(pause)

    # -- hosts

    async def _wait_for_slot(self) -> None:
        """Wait for a place in the rate that the recipe allows."""
        if self.config.requests_per_second:
            now = time.monotonic()
            slot = max(now, self._next_slot)
            self._next_slot = slot + 1 / self.config.requests_per_second
            await asyncio.sleep(slot - now)

    async def _take_host(self, deadline: float) -> Host | None:
        """Wait for the next host that does not rest. None if none will be free before
        `deadline`."""
        while True:
            now = time.monotonic()
            for host in itertools.islice(self._turns, len(self._hosts)):
                if host.free_at <= now:
                    if host.failures >= self.config.breaker_failures:
                        # one request tries the host; the others see it resting until that request
                        # is done
                        host.rest_until = now + self.config.breaker_seconds
                    return host
            free_at = min(host.free_at for host in self._hosts)
            if free_at >= deadline:
                return None
            await asyncio.sleep(min(free_at - now, _POLL_SECONDS))

    def _note_failure(self, host: Host, failure: FailedError) -> None:
        now = time.monotonic()
        host.busy_until = max(host.busy_until, now + failure.after)
        if failure.is_busy:
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

    # -- one attempt

    async def _attempt(
        self, connection: httpx.AsyncHTTPTransport, request: httpx.Request, deadline: float
    ) -> bytes:
        """Return the body of one good answer, within the time for one attempt."""
        seconds = max(0.0, min(self.config.read_seconds, deadline - time.monotonic()))
        try:
            async with asyncio.timeout(seconds):
                async with aclosing(await connection.handle_async_request(request)) as response:
                    if not response.is_success:
                        raise await self._refusal(request, response)
                    return await self._read_body(response)
        except TimeoutError:
            raise FailedError(f"no whole answer within {seconds:g} s", is_answered=False) from None
        except RemoteError:  # also an OSError, but final
            raise
        except (httpx.HTTPError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise self._final(
                    request, "its certificate is not trusted", "correct the server's certificate"
                ) from None
            cause = f"{type(error).__name__}: {printable(self.hide(str(error)), 120)}"
            raise FailedError(cause, is_answered=False) from None

    async def _read_body(self, response: httpx.Response) -> bytes:
        encoding = response.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise FailedError("the answer is compressed, which was not asked for")
        limit = self.config.max_bytes
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise FailedError(f"the answer has {declared} bytes, more than max_bytes = {limit}")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > limit:
                raise FailedError(f"the answer has more than max_bytes = {limit} bytes")
        return bytes(body.replace(self._token.encode(), b"***") if self._token else body)

    async def _refusal(self, request: httpx.Request, response: httpx.Response) -> Exception:
        """Return the error for an answer whose status is not a success."""
        status = response.status_code
        if 300 <= status < 400:
            cause = f"answered {status}: a redirect is not followed"
            return self._final(request, cause, "name the final address in urls")
        beginning = bytearray()
        # the status decides; its text only helps people
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(_REFUSAL_SECONDS):
                async for chunk in response.aiter_raw():
                    beginning += chunk
                    if len(beginning) >= _REFUSAL_BYTES:
                        break
        text = self.hide(beginning.decode(errors="replace")).strip()
        cause = f"answered {status}: {printable(text, 120) or 'no text'}"
        if status in _MAY_PASS:
            after = _retry_after(response.headers.get("retry-after", ""))
            return FailedError(cause, after=after, is_busy=status == 429)
        if status in _ABOUT_ROWS:
            return FailedError(cause, is_refused=True)
        hints = {
            401: "correct the token",
            403: "correct the token",
            404: "correct the path in urls, or model",
        }
        otherwise = "correct the server's section in the recipe, or the server"
        return self._final(request, cause, hints.get(status, otherwise))

    def _final(self, request: httpx.Request, cause: str, next: str) -> RemoteError:
        """Return the error for a permanent failure."""
        return RemoteError(
            f"reward server {self.config.name}",
            f"{request.url}: {cause}",
            state="finished shards are kept.",
            next=next,
        )


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
