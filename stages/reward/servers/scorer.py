"""A server as a scorer: batches become requests, some at a time, and answers become one part a row.

What fails is a row's error, never a number: a request that is not answered in the retries and the
time that the config allows, an answer that is not of its dialect, a number that is none. A row that
spoils a request for others is found by halving. What no row could pass (a refused token, a
redirect, a wrong path) ends scoring with RemoteError.

    scorer = ServerScorer(ServerConfig(dialect="quiver", urls=["http://127.0.0.1:8700"]))
    parts = scorer.score(batch)
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from quiver.schemas.errors import ConfigError, ResourceError, printable
from quiver.stages.reward.scoring import OFFERED, Batch, Notice, Part

from .config import ServerConfig, secret
from .dialects import DIALECTS, judge
from .dialects.rows import Row, as_rows, fields, to_json
from .dialects.strict import read_json
from .transport import ExhaustedError, RefusedError, Transport


class ServerScorer:
    """Scores batches on a server. `score` is called from one thread at a time, `close` from any."""

    def __init__(
        self,
        config: ServerConfig,
        notice: Notice = lambda *_: None,
        prefill: Callable[[str], str] = lambda _: "",
    ) -> None:
        """`notice` hears at once of rows that failed; `prefill`: the beginning of the answer that a
        rollout, by its id, was given.

        ConfigError: the token's variable holds none.
        """
        self.config, self.name, self.weight, self._notice, self._prefill = (
            config,
            config.name,
            config.weight,
            notice,
            prefill,
        )
        self.seconds = 0.0
        self._stop: Callable[[], Any] | None = None
        self._closed = False
        self._dialect = DIALECTS[config.dialect]
        urls = [urlsplit(url) for url in config.urls]
        paths = [url._replace(path=url.path or self._dialect.path).geturl() for url in urls]
        self._transport = Transport(
            config, paths, secret(config.token, f"reward server {config.name}")
        )

    def require(self, columns: Iterable[str]) -> None:
        """ConfigError unless every column that is sent is there."""
        offered = set(columns)
        for missing in sorted(self._columns(offered) - offered):
            near = difflib.get_close_matches(missing, offered, 1, 0.5)
            raise ConfigError(
                f"reward server {self.name}",
                f"sends {printable(missing)}, which is no column of the prompts "
                f"({printable(', '.join(sorted(offered))) or 'none'})"
                + (f"; did you mean {near[0]}?" if near else ""),
                next="correct label, columns or rubric of that server",
            )

    def _columns(self, offered: Iterable[str]) -> set[str]:
        """The user's columns that requests hold, of those `offered` where the config names none."""
        config = self.config
        if config.dialect == "quiver":
            return set(offered) - set(OFFERED) if config.columns is None else set(config.columns)
        return (
            fields(config.rubric) - judge.OFFERED
            if config.dialect == "openai-judge"
            else {config.label} - {""}
        )

    def score(self, batch: Batch) -> list[Part]:
        """One part a row of `batch`, in order. RemoteError where the server refuses whatever is
        asked (401, a redirect, …).

        What `notice` raises, this does. ResourceError after `close`.
        """
        start = time.monotonic()
        rows = as_rows(batch, sorted(self._columns(batch)), ids=self.config.dialect == "quiver")
        rows = [row._replace(completion=self._prefill(row.id) + row.completion) for row in rows]
        try:
            return _finish(self._score(rows))
        except asyncio.CancelledError:
            raise ResourceError(
                f"reward server {self.name}", "was closed while it was asked"
            ) from None
        finally:
            self.seconds += time.monotonic() - start

    def close(self) -> None:
        """Give up what is under way; nothing is held between calls."""
        self._closed = True
        if stop := self._stop:
            with contextlib.suppress(RuntimeError):  # its loop came to an end by itself meanwhile
                stop()

    async def _score(self, rows: list[Row]) -> list[Part]:
        """Requests of the rows, `concurrency` at a time; each worker has a connection of its
        own."""
        parts = [Part(error="was not asked")] * len(rows)
        requests = self._requests(rows)
        jobs = iter(requests)

        async def work() -> None:
            async with self._transport.connection() as connection:
                for places in jobs:
                    found = await self._ask(connection, [rows[at] for at in places])
                    for at, part in zip(places, found, strict=True):
                        parts[at] = part
                        if part.error is not None:
                            self._notice(self.name, rows[at].id, part.error)

        fatal = None
        try:
            async with self._until_closed(), asyncio.TaskGroup() as group:
                for _ in range(min(self.config.concurrency, len(requests))):
                    group.create_task(work())
        except* Exception as errors:  # the first one ended the others
            fatal = errors.exceptions[0]
        if fatal:
            raise fatal
        return parts

    @contextlib.asynccontextmanager
    async def _until_closed(self) -> AsyncIterator[None]:
        """While it is open, `close` cancels this task, from whatever thread."""
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self._closed:
                raise asyncio.CancelledError
            yield
        finally:
            self._stop = None

    def _requests(self, rows: list[Row]) -> list[list[int]]:
        """The positions of the rows that share each request."""
        together = [at for at, row in enumerate(rows) if not self._dialect.alone(row)]
        size = self.config.batch_rows
        chunks = [together[start : start + size] for start in range(0, len(together), size)]
        return chunks + [[at] for at, row in enumerate(rows) if self._dialect.alone(row)]

    async def _ask(
        self, connection: Any, rows: list[Row], deadline: float | None = None
    ) -> list[Part]:
        """The parts of one request. Rows that spoil it for the others are found by halving, while
        the hosts work otherwise."""
        ends = deadline or time.monotonic() + self.config.total_seconds
        try:
            body = to_json(self._dialect.encode(rows, self.config)).encode()
        except (ValueError, TypeError) as error:
            cause, halve = f"can not be sent: {printable(error, 120)}", True
        else:
            try:
                return await self._transport.ask(
                    connection,
                    body,
                    self._key(rows, body),
                    lambda raw: self._read(raw, rows),
                    deadline,
                )
            except RefusedError as error:
                cause, halve = str(error), True
            except ExhaustedError as error:
                cause, halve = str(error), error.answered and self._transport.hosts.working
        if not halve or len(rows) == 1:
            return [Part(error=cause)] * len(rows)
        middle = len(rows) // 2
        return [
            *await self._ask(connection, rows[:middle], ends),
            *await self._ask(connection, rows[middle:], ends),
        ]

    def _read(self, raw: bytes, rows: list[Row]) -> list[Part]:
        parts = self._dialect.decode(read_json(raw), rows, self.config)
        hide = self._transport.hide  # again: what was escaped in JSON is plain now
        return [
            Part(value, error and hide(error), extra and hide(extra))
            for value, error, extra in parts
        ]

    def _key(self, rows: list[Row], body: bytes) -> str:
        """The same for each attempt at these rows and texts, another for any other: a server may
        know a repetition by it."""
        said = to_json([self.config.revision, *(row.id for row in rows)]).encode()
        return hashlib.sha256(said + b"\n" + body).hexdigest()


def _finish(work: Coroutine[Any, Any, list[Part]]) -> list[Part]:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(
        1
    ) as pool:  # the caller is a notebook or a server with a loop of its own
        return pool.submit(asyncio.run, work).result()
