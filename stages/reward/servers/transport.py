"""Send one request to one of several hosts until it is answered, refused, or out of time.

* Retries, with exponential back-off and full jitter, for failures that may be temporary (see
  `client`). Retry-After is respected; a 429 costs time, not a retry.
* Permanent failures end everything at once with RemoteError: redirects, 401, 403, 404, 422 and
  similar ones. 400 and 413 concern the rows of the request; 422 too, if cells of theirs were left
  out.
* A host that fails several times in a row rests. After a while one request tries it, and the others
  wait for its result.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import httpx

from quiver.schemas.errors import ConfigError, RemoteError, printable
from quiver.stages.core.client import Client, FailedError

if TYPE_CHECKING:
    from .config import ServerConfig

log = logging.getLogger(__name__)
_T = TypeVar("_T")
ABOUT_ROWS = {400, 413}
"""Statuses of a server that cannot take the rows of one request."""
ABOUT_COLUMNS = {422}
"""Statuses of a server that lacks a column; they concern rows whose cells could not be sent."""
_LONGEST_PAUSE = 30.0  # seconds of back-off
_POLL_SECONDS = 0.05  # between checks of resting hosts
_ADVICE = {
    401: "correct the token",
    403: "correct the token",
    404: "correct the path in urls, or model",
}


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


@dataclass
class Deadline:
    """End of the time for one request, and for the requests that it is halved into."""

    at: float | None = None
    """In monotonic seconds. None until the first attempt has its place in the rate limit."""

    def is_over(self) -> bool:
        """Return True if no time is left."""
        return self.at is not None and time.monotonic() >= self.at


class Transport:
    """Sends bodies to the hosts of one server section. The state of the hosts outlives an event
    loop."""

    def __init__(self, config: ServerConfig, urls: list[str]) -> None:
        """Raises ConfigError if a URL is invalid."""
        self.config = config
        try:
            self._hosts = [Host(url) for url in map(httpx.URL, urls) if url.host]
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"reward server {config.name}", f"urls: {printable(error)}", next="correct the URL"
            ) from None
        self._turns = itertools.cycle(self._hosts)
        self._next_slot = 0.0

    @property
    def has_working_host(self) -> bool:
        """True if some host has not failed too often."""
        return any(host.failures < self.config.breaker_failures for host in self._hosts)

    async def ask(
        self,
        client: Client,
        body: bytes,
        key: str,
        read: Callable[[bytes], _T],
        deadline: Deadline,
        about_rows: Container[int] = ABOUT_ROWS,
    ) -> _T:
        """Send `body` and return what `read` makes of the answer.

        Args:
            key: Idempotency key, the same in every attempt.
            read: May raise MalformedError, which counts as a failed attempt.
            deadline: Set to `total_seconds` from now if it has no time yet. Waiting for a place in
                the rate limit moves it.
            about_rows: Statuses that refuse these rows alone.

        Raises:
            FailedError: The rows are refused, or no good answer came within the retries and the
                time.
            RemoteError: Further requests are useless.
        """
        failure = FailedError("no host was free in time")
        failures = 0
        attempts = 0
        while True:
            if self.config.requests_per_second:  # wait for a place in the rate
                now = time.monotonic()
                slot = max(now, self._next_slot)
                self._next_slot = slot + 1 / self.config.requests_per_second
                await asyncio.sleep(slot - now)
                if deadline.at is not None:
                    deadline.at += time.monotonic() - now
            if deadline.at is None:
                deadline.at = time.monotonic() + self.config.total_seconds
            host = await self._take_host(deadline.at)
            if host is None:
                raise FailedError(f"{failure} (all hosts rest)", failure.status)
            seconds = min(self.config.read_seconds, deadline.at - time.monotonic())
            if seconds <= 0:
                raise FailedError(f"{failure} ({attempts} attempts)", failure.status)
            try:
                answer = await client.ask(
                    host.url,
                    body,
                    read,
                    seconds=seconds,
                    most_bytes=self.config.max_bytes,
                    headers={"Idempotency-Key": key},
                )
                host.reset()
                return answer
            except FailedError as error:
                if error.status in about_rows:
                    host.reset()
                    raise
                if error.is_final:
                    otherwise = "correct the server's section in the recipe, or the server"
                    raise RemoteError(
                        f"reward server {self.config.name}",
                        f"{host.url}: {error}",
                        state="finished shards are kept.",
                        next=_ADVICE.get(error.status, otherwise),
                    ) from None
                failure = error
            self._note_failure(host, failure)
            failures += failure.status != httpx.codes.TOO_MANY_REQUESTS
            longest = self.config.backoff_seconds * 2 ** min(attempts, 20)
            attempts += 1
            pause = random.uniform(0, min(_LONGEST_PAUSE, longest))
            if failures > self.config.retries or time.monotonic() + pause >= deadline.at:
                raise FailedError(f"{failure} ({attempts} attempts)", failure.status)
            await asyncio.sleep(pause)

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
        if failure.status == httpx.codes.TOO_MANY_REQUESTS:
            return
        host.failures += 1
        if host.failures >= self.config.breaker_failures:
            host.rest_until = now + self.config.breaker_seconds
        if host.failures == self.config.breaker_failures:
            log.warning(
                "reward server %s: %s failed %d times in a row and rests",
                self.config.name,
                host.url,
                host.failures,
            )
