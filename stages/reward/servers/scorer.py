"""Score rollouts on a reward server: batches become requests, and answers become one part per row.
Look here for what happens to a row whose request fails.

A failure is a row's error, never a number. Failures are: no answer within the configured retries
and time, an answer that breaks the dialect, a value that is no number. A row that spoils a request
for others is found by halving. An error that every row would get (a refused token, a redirect, a
wrong path) ends scoring with RemoteError.

    scorer = ServerScorer(ServerConfig(dialect="quiver", urls=["http://127.0.0.1:8700"]))
    parts = scorer.score(batch)
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from quiver.schemas.errors import ConfigError, ResourceError, printable, quoted_name
from quiver.schemas.prompts import MEDIA
from quiver.stages.core.client import Client, FailedError
from quiver.stages.core.servers import read_json, secret
from quiver.stages.reward import media
from quiver.stages.reward.scoring import OFFERED, Batch, Notice, Part

from .config import ServerConfig
from .dialects import DIALECTS, named_columns, require_named
from .dialects.rows import Row, as_rows, to_json, without_json
from .transport import ABOUT_COLUMNS, ABOUT_ROWS, Deadline, Transport

log = logging.getLogger(__name__)


class ServerScorer:
    """Scores batches on a server. `score` is called from one thread at a time, `close` from any."""

    gpus = ()

    def __init__(
        self,
        config: ServerConfig,
        notice: Notice = lambda *_: None,
        prefill: Callable[[str], str] = lambda _: "",
    ) -> None:
        """Raises ConfigError if the token's variable is not set.

        Args:
            notice: Called at once for each row that failed.
            prefill: Returns the beginning of the answer that a rollout, by its id, was given.
        """
        self.config = config
        self.name = config.name
        self.seconds = 0.0
        self._notice = notice
        self._prefill = prefill
        self._stop: Callable[[], Any] | None = None
        self._closed = False
        self._left_out: set[str] = set()
        """Columns that the log has named as not sent."""
        self._lacking: set[str] = set()
        """Rows with cells that are not sent."""
        self._dialect = DIALECTS[config.dialect]
        urls = [
            url._replace(path=url.path or self._dialect.path).geturl()
            for url in map(urlsplit, config.urls)
        ]
        token = secret(config.token, f"reward server {config.name}")
        self._connect = lambda: Client(
            token, config.connect_seconds, keeps_connections=self._dialect.has_ids
        )
        self._transport = Transport(config, urls)

    def require(self, columns: Iterable[str]) -> None:
        """Raise ConfigError unless every column to send exists, and none is of files."""
        columns = columns if isinstance(columns, Mapping) else dict.fromkeys(columns)
        for name in sorted({*MEDIA.values()} & require_named(self.config, columns)):
            if columns[name] == ():
                raise ConfigError(
                    f"reward server {self.name}",
                    f"cannot be sent {name}: these are the prompts' files, and no text",
                    next=f"leave {name} out of reward.servers.{self._dialect.columns_key}; a judge "
                    "is shown the pictures by itself",
                )

    def score(self, batch: Batch) -> list[Part]:
        """Return one part per row of `batch`, in order. Call it in a thread without an event loop.

        Raises:
            RemoteError: The server refuses every request (401, a redirect, …).
            ResourceError: The scorer was closed.

        Errors that `notice` raises pass through.
        """
        started_at = time.monotonic()
        held = media.names_in(batch)
        named = named_columns(self.config, batch)
        columns = {*batch} - {*OFFERED} - held if named is None else named
        if self._dialect.shows_pictures:
            columns |= held & {MEDIA["image"]}
        rows = [
            row._replace(completion=self._prefill(row.id) + row.completion)
            for row in as_rows(batch, sorted(columns))
        ]
        if named is None:
            rows = self._sendable(rows)
        try:
            return asyncio.run(self._score(rows))
        except asyncio.CancelledError:
            raise ResourceError(
                f"reward server {self.name}", "was closed while it was asked"
            ) from None
        finally:
            self.seconds += time.monotonic() - started_at

    def _sendable(self, rows: list[Row]) -> list[Row]:
        """Return `rows` without the cells that have no JSON. The log names each affected column
        once. Called only if the config names no columns."""
        sendable = []
        left_out = {}
        for row in rows:
            problems = without_json(row.columns)
            left_out.update(problems)
            sent = {name: cell for name, cell in row.columns.items() if name not in problems}
            sendable.append(row._replace(columns=sent))
            if problems:
                self._lacking.add(row.id)
        new = sorted(left_out.keys() - self._left_out)
        if new:
            log.warning(
                "reward server %s: cells of these columns are not sent: %s; name the columns to "
                "send in reward.servers.columns",
                self.name,
                printable(", ".join(f"{name} ({left_out[name]})" for name in new), 1000),
            )
        self._left_out |= left_out.keys()
        return sendable

    def close(self) -> None:
        """Cancel what is running; nothing is held between calls."""
        self._closed = True
        if stop := self._stop:
            with suppress(RuntimeError):  # the loop ended by itself meanwhile
                stop()

    async def _score(self, rows: list[Row]) -> list[Part]:
        """Send requests of the rows, `concurrency` at a time; each worker has its own connection.
        `close` may cancel it from any thread."""
        parts: dict[str, Part] = {}
        is_alone = self._dialect.is_alone
        size = self.config.batch_rows
        alike: dict[tuple[str, ...], list[Row]] = {}  # rows of a request have the same columns
        for row in rows:
            if not is_alone(row):
                alike.setdefault(tuple(row.columns), []).append(row)
        requests = [
            together[start : start + size]
            for together in alike.values()
            for start in range(0, len(together), size)
        ]
        requests += [[row] for row in rows if is_alone(row)]
        remaining = iter(requests)

        async def work() -> None:
            async with self._connect() as client:
                for asked in remaining:
                    for row, part in zip(asked, await self._ask(client, asked), strict=True):
                        parts[row.id] = part
                        if part.error is not None:
                            self._notice(self.name, row.id, part.error)

        task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self._closed:
                raise asyncio.CancelledError
            # the first error ends the loop, and with it the other workers
            await asyncio.gather(
                *(work() for _ in range(min(self.config.concurrency, len(requests))))
            )
        finally:
            self._stop = None
        return [parts[row.id] for row in rows]

    async def _ask(
        self, client: Client, rows: list[Row], deadline: Deadline | None = None
    ) -> list[Part]:
        """Return the parts of one request. If hosts work otherwise, a failed request is halved to
        find the rows that spoil it, within the same time.

        A server may refuse rows for the cells that were left out of all of them.
        """
        deadline = deadline or Deadline()
        lacks = rows[0].id in self._lacking
        may_be_a_row = True

        def read(raw: bytes) -> list[Part]:
            hide = client.hide  # again, since a token escaped in JSON is plain text now
            return [
                Part(value, error and hide(error), extra and hide(extra))
                for value, error, extra in self._dialect.decode(read_json(raw), rows, self.config)
            ]

        try:
            body = to_json(self._dialect.encode(rows, self.config)).encode()
        except (ValueError, TypeError) as error:
            cause = self._not_sent(rows[0]) or f"cannot be sent: {printable(error, 120)}"
        else:
            # the same key for each attempt at these rows and texts, another for any other: a server
            # may recognise a repeated request by it
            ids = to_json([self.config.revision, *(row.id for row in rows)]).encode()
            key = hashlib.sha256(ids + b"\n" + body).hexdigest()
            try:
                statuses = ABOUT_ROWS | ABOUT_COLUMNS if lacks else ABOUT_ROWS
                return await self._transport.ask(client, body, key, read, deadline, statuses)
            except FailedError as error:
                cause = str(error)
                may_be_a_row = error.status in ABOUT_ROWS or (
                    error.status > 0
                    and error.status not in ABOUT_COLUMNS
                    and self._transport.has_working_host
                )
        if len(rows) == 1 or not may_be_a_row or deadline.is_over():
            return [Part(error=cause)] * len(rows)
        middle = len(rows) // 2
        return [
            *await self._ask(client, rows[:middle], deadline),
            *await self._ask(client, rows[middle:], deadline),
        ]

    def _not_sent(self, row: Row) -> str:
        """Return the error of a row whose requested columns include one without JSON; empty if all
        have JSON."""
        for name, problem in without_json(row.columns).items():
            if name not in media.OFFERED:
                return (
                    f"column {quoted_name(name)} cannot be sent: {problem}; leave it out of "
                    f"reward.servers.{self._dialect.columns_key}, or make it text or a number in "
                    "the rows"
                )
        return ""
