"""Tools of an MCP server, which a command starts and which talks over its standard streams.

    tools = ["mcp:python my_server.py"]

Each worker process starts one server for all its environments, so a tool's answer must depend on
its arguments alone. Needs the package mcp.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.environments.tool_schemas import schema_of

_START_SECONDS = 60.0


class Server:
    """A running server. A thread holds its connection for the life of this process."""

    def __init__(self, command: str) -> None:
        """Start the server. Raises ConfigError if it does not start or mcp is not installed."""
        self.command = command
        self._loop = asyncio.new_event_loop()
        self._client: Future[Any] = Future()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        try:
            client = self._client.result(_START_SECONDS)
            self.tools = self._wait(_all_tools(client))
        except Exception as error:  # raised by the library or by the server
            raise ConfigError(
                f"generate.turns.tools mcp:{printable(command)}",
                f"the server cannot be used: {type(error).__name__}: {printable(error)}",
                next="see that the command starts an MCP server, and that the package mcp is there",
            ) from error

    def call(self, name: str, /, **arguments: Any) -> str | list[bytes | str]:
        """Return the text of a tool's answer; pictures, if any, come before the text in a list.

        Raises RuntimeError if the tool reports an error.
        """
        answer = self._wait(self._client.result().call_tool(name, arguments))
        pictures = [block for block in answer.content if block.type == "image"]
        texts = [
            getattr(block, "text", f"({block.type})")
            for block in answer.content
            if block.type != "image"
        ]
        text = "\n".join(texts)
        if answer.is_error:
            raise RuntimeError(text)
        return [*(base64.b64decode(block.data) for block in pictures), text] if pictures else text

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connect(self) -> None:
        """Open the connection and hold it until this process ends."""
        try:
            from mcp import Client, StdioServerParameters

            program, *arguments = shlex.split(self.command)
            parameters = StdioServerParameters(command=program, args=arguments)
            async with Client(parameters) as client:
                self._client.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if self._client.done():
                raise
            self._client.set_exception(error)


async def _all_tools(client: Any) -> list[Any]:
    tools: list[Any] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools


def open_tools(name: str) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """Return schemas and functions of the server that the command `name` starts.

    Raises ConfigError.
    """
    server = Server(name)
    tools: dict[str, Callable[..., Any]] = {}
    for tool in server.tools:
        function = partial(server.call, tool.name)
        function.schema = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        tools[tool.name] = function
    return [schema_of(function, f"mcp:{name}") for function in tools.values()], tools
