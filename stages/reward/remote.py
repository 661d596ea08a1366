"""A server as a scorer: batches become requests, some at a time, and answers become one part a row.

What fails is a row's error, never a number: a request that is not answered in the retries and the time that the config allows, an
answer that is not of its dialect, a number that is none. A row that spoils a request for others is found by halving. What no row
could pass (a refused token, a redirect, a wrong path) ends scoring with RemoteError.

    scorer = ServerScorer(ServerConfig(dialect="quiver", urls=["http://127.0.0.1:8700"]))
    parts = scorer.score(batch)
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import time
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from schemas.errors import ConfigError, QuiverError, printable
from schemas.manifest import digest

from .dialects import DIALECTS, judge
from .dialects.rows import Row, as_rows, fields, to_json
from .dialects.strict import read_json
from .scoring import Part
from .servers import ServerConfig, secret
from .transport import ExhaustedError, RefusedError, Transport

VERSION = 1
"""Of what the client makes of an answer: a higher one makes rewards anew."""


class ServerScorer:
    """Scores batches on a server. One object may be used from one thread at a time."""

    def __init__(self, config: ServerConfig) -> None:
        """ConfigError: the token's variable is not set."""
        self.config, self.name, self.weight = config, config.name, config.weight
        self.fingerprint = digest(["server", VERSION, {k: v for k, v in config.key().items() if k not in ("name", "weight")}])
        self.seconds = 0.0
        self._dialect = DIALECTS[config.dialect]
        urls = [urlsplit(url) for url in config.urls]
        paths = [url._replace(path=url.path or self._dialect.path).geturl() for url in urls]
        self._transport = Transport(config, paths, secret(config))

    def require(self, columns: Iterable[str]) -> None:
        """ConfigError unless every column that is sent is there."""
        offered = set(columns)
        own = judge.OFFERED if self.config.dialect == "openai-judge" else set()
        asked = {*(self.config.columns or ()), *filter(None, [self.config.label])}
        asked |= fields(self.config.rubric) if self.config.dialect == "openai-judge" else set()
        for missing in sorted(asked - offered - own):
            near = difflib.get_close_matches(missing, offered | own, 1, 0.5)
            raise ConfigError(
                f"reward server {self.name}",
                f"sends {printable(missing)}, which is no column of the prompts ({printable(', '.join(sorted(offered))) or 'none'})"
                + (f"; did you mean {near[0]}?" if near else ""),
                next="correct label, columns or rubric of that server",
            )

    def score(self, batch: Mapping[str, list[Any]]) -> list[Part]:
        """One part a row of `batch`, in order. RemoteError where the server refuses whatever is asked (401, a redirect, …)."""
        start = time.monotonic()
        try:
            return _finish(self._score(as_rows(batch)))
        finally:
            self.seconds += time.monotonic() - start

    def close(self) -> None:
        """Nothing is held between calls."""

    async def _score(self, rows: list[Row]) -> list[Part]:
        """Requests of the rows, `concurrency` at a time; each worker has a connection of its own."""
        parts = [Part(error="was not asked")] * len(rows)
        requests = self._requests(rows)
        jobs = iter(requests)

        async def work() -> None:
            async with self._transport.connection() as connection:
                for places in jobs:
                    found = await self._ask(connection, [rows[at] for at in places])
                    for at, part in zip(places, found, strict=True):
                        parts[at] = part

        fatal = None
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.config.concurrency, len(requests))):
                    group.create_task(work())
        except* QuiverError as errors:
            fatal = errors.exceptions[0]
        if fatal:
            raise fatal
        return parts

    def _requests(self, rows: list[Row]) -> list[list[int]]:
        """The positions of the rows that share each request."""
        together = [at for at, row in enumerate(rows) if not self._dialect.alone(row)]
        size = self.config.batch_rows
        chunks = [together[start : start + size] for start in range(0, len(together), size)]
        return chunks + [[at] for at, row in enumerate(rows) if self._dialect.alone(row)]

    async def _ask(self, connection: Any, rows: list[Row], deadline: float | None = None) -> list[Part]:
        """The parts of one request. Rows that spoil it for the others are found by halving, while the hosts work otherwise."""
        ends = deadline or time.monotonic() + self.config.total_seconds
        try:
            body = to_json(self._dialect.encode(rows, self.config)).encode()
        except (ValueError, TypeError) as error:
            cause, halve = f"can not be sent: {printable(error, 120)}", True
        else:
            try:
                return await self._transport.ask(
                    connection, body, self._key(rows, body), lambda raw: self._read(raw, rows), deadline
                )
            except RefusedError as error:
                cause, halve = str(error), True
            except ExhaustedError as error:
                cause, halve = str(error), error.answered and self._transport.hosts.working
        if not halve or len(rows) == 1:
            return [Part(error=cause)] * len(rows)
        middle = len(rows) // 2
        return [*await self._ask(connection, rows[:middle], ends), *await self._ask(connection, rows[middle:], ends)]

    def _read(self, raw: bytes, rows: list[Row]) -> list[Part]:
        return self._dialect.decode(read_json(raw), rows, self.config)

    def _key(self, rows: list[Row], body: bytes) -> str:
        """The same for each attempt at these rows and texts, another for any other: a server may know a repetition by it."""
        said = to_json([self.config.revision, *(row.id for row in rows)]).encode()
        return hashlib.sha256(said + b"\n" + body).hexdigest()


def _finish(work: Coroutine[Any, Any, list[Part]]) -> list[Part]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:  # the caller is a notebook or a server with a loop of its own
        return pool.submit(asyncio.run, work).result()
