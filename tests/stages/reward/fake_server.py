"""A server on loopback that misbehaves on demand: its answers are written byte by byte, so nothing
is too broken to send.

with FakeServer(lambda asked: reply({"rewards": [1.0]})) as server:
    server.url, server.asked
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

Bytes = bytes | Iterator[bytes] | AsyncIterator[bytes] | None
"""What is sent: whole, in pieces, in pieces with pauses; None cuts the connection by a reset."""


class Asked(NamedTuple):
    """One request. `number` counts from 0 over all connections."""

    number: int
    path: str
    headers: dict[str, str]
    body: Any


class FakeServer:
    """Answers each request with what `behave` makes of it; a coroutine function may wait first."""

    def __init__(self, behave: Callable[[Asked], Any]) -> None:
        self.behave, self.asked = behave, []
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**26)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {
                    name.lower(): text
                    for name, _, text in (line.partition(": ") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(
                    len(self.asked), head[0].split()[1], headers, json.loads(body or b"null")
                )
                self.asked.append(asked)
                answer = self.behave(asked)
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if not await self._send(writer, answer):
                    return
        except (asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
            pass
        finally:
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, answer: Bytes) -> bool:
        """Send an answer; true if the connection stays open."""
        if answer is None:
            writer.transport.abort()
            return False
        async for piece in pieces_of(answer):
            writer.write(piece)
            await writer.drain()
        return isinstance(answer, bytes) and b"\r\nconnection: close" not in answer.lower()


async def pieces_of(answer: Bytes) -> AsyncIterator[bytes]:
    if hasattr(answer, "__aiter__"):
        async for piece in answer:
            yield piece
    else:
        for piece in [answer] if isinstance(answer, bytes) else answer:
            yield piece


def reply(body: Any, status: int = 200, **headers: str) -> bytes:
    """A whole answer: `body` as JSON, or as it is where it is bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} Whatever",
        "Content-Type: application/json",
        f"Content-Length: {len(raw)}",
    ]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + raw


def scored(asked: Asked, reward: float = 0.5) -> dict[str, Any]:
    """A good answer of dialect quiver: the same reward for each row."""
    return {
        "format": 1,
        "rows": [{"id": row["id"], "reward": reward} for row in asked.body["rows"]],
    }


class Flood:
    """An answer that has no end before `bytes_at_most`, in pieces of `piece`, with pauses between
    them; `bytes_sent` says how much of it went out."""

    def __init__(
        self, piece: bytes, bytes_at_most: int = 2**26, seconds_between: float = 0.0, **headers: str
    ) -> None:
        self.piece, self.bytes_at_most, self.seconds_between = piece, bytes_at_most, seconds_between
        self.headers = headers
        self.bytes_sent = 0

    async def __call__(self, asked: Asked) -> AsyncIterator[bytes]:
        """To each request the same."""
        return self._pieces()

    async def _pieces(self) -> AsyncIterator[bytes]:
        length = b"Content-Length: %d" % self.bytes_at_most
        if "Transfer_Encoding" in self.headers:
            length = b"Server: flood"
        yield reply(b"", **self.headers).replace(b"Content-Length: 0", length)
        for _ in range(self.bytes_at_most // len(self.piece)):
            yield self.piece
            self.bytes_sent += len(self.piece)
            await asyncio.sleep(self.seconds_between)
