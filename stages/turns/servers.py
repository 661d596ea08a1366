"""Environments and tools on servers: OpenEnv over HTTP, and MCP over a command's streams.

Each OpenEnv episode is reset and stepped under its own id:

    POST URL/reset  {"seed": 7, "episode_id": "…", column: …}
    POST URL/step   {"action": {"message": "…"}, "episode_id": "…"}
                    → {"observation": {…}, "reward": 0.5, "done": false}

The action has the turn's text under `action_key` (set in `arguments`; default: "message"). The
policy reads the member `text_key` of the observation, which each must have. Without `text_key` it
reads the only member if that is a text, else the whole observation as JSON. The server must keep
episodes apart by their id; a server that makes a new environment for each request cannot be used.

Of an MCP server (`tools = ["mcp:python my_server.py"]`) each process starts one for all its
environments, so a tool's answer must depend on its arguments alone. Needs the package mcp.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import httpx

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.outside import MEDIA
from quiver.schemas.plain import read_json
from quiver.stages.turns.environment import (
    Factory,
    Message,
    Row,
    Step,
    Turn,
    read_opening,
    read_step,
    read_text,
)

_BESIDE = ("reward", "done", "metadata")
_LONGEST_SECONDS = 24 * 3600.0  # never reached: the step's own limit ends this process earlier
_MOST_BYTES = 16 << 20
_START_SECONDS = 60.0


# -- OpenEnv


class OpenEnvironment:
    """One episode on the server."""

    def __init__(self, client: httpx.Client, action_key: str, text_key: str | None) -> None:
        self._client = client
        self._action_key = action_key
        self._text_key = text_key
        self._episode_id = str(uuid.uuid4())

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Reset the episode; its first observation is the opening."""
        return read_opening(self._ask("reset", {**row, "seed": seed % 2**31})["text"])

    def step(self, turn: Turn) -> Step:
        """Send one action and return the server's answer."""
        answer = self._ask("step", {"action": {self._action_key: turn.text}})
        done = answer.get("done") is True
        info = answer.get("metadata") or None
        return read_step(
            Step(text=answer["text"], reward=answer.get("reward"), done=done, info=info)
        )

    def finish(self) -> float | None:
        """Return None, because OpenEnv rewards steps only."""
        return None

    def close(self) -> None:
        """Do nothing, because the server manages its episodes itself."""

    def _ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """POST a request and return its answer, with the observation's text as `text`.

        Raises RuntimeError if the server refuses, or answers without an observation.
        """
        request = {**request, "episode_id": self._episode_id}
        received = bytearray()
        with self._client.stream("POST", f"/{verb}", json=request) as response:
            for chunk in response.iter_raw():  # not decompressed: a small body could expand hugely
                received += chunk
                if len(received) > _MOST_BYTES:
                    raise RuntimeError(f"/{verb}: its answer has more than {_MOST_BYTES} bytes")
        body = printable(received.decode(errors="replace"))
        if response.status_code != 200:
            raise RuntimeError(f"/{verb}: {response.status_code} {body}")
        try:
            answer = read_json(received)
        except ValueError as error:
            raise RuntimeError(f"/{verb}: no JSON, {printable(error)}: {body}") from None
        observation = answer.get("observation") if isinstance(answer, dict) else None
        if not isinstance(observation, dict):
            raise RuntimeError(f"/{verb}: no observation in {body}")
        members = {name: member for name, member in observation.items() if name not in _BESIDE}
        shown: Any = members
        if self._text_key is not None:
            if self._text_key not in members:
                raise RuntimeError(
                    f"/{verb}: its observation has no {printable(self._text_key)}, it has "
                    f"{printable(', '.join(members)) or 'no members'}; correct text_key in "
                    "generate.turns.arguments"
                )
            shown = members[self._text_key]
        elif len(members) == 1 and isinstance(next(iter(members.values())), str):
            (shown,) = members.values()
        return {**answer, "text": read_text(shown)}


def open_openenv(url: str, arguments: dict[str, Any]) -> Factory:
    """Return the maker of episodes on the server at a URL.

    Raises ConfigError if `url` is not a URL or an argument is unknown.
    """
    unknown = sorted(set(arguments) - {"action_key", "text_key"})
    if unknown or not url.startswith(("http://", "https://")):
        problem = f"unknown argument {printable(unknown[0])}" if unknown else "is not a URL"
        raise ConfigError(
            f"generate.turns.environment openenv:{printable(url)}",
            f"{problem}; expected openenv:http://… with action_key and text_key as arguments",
            next="correct generate.turns",
        )
    # ignore proxies and passwords in this machine's environment variables, and follow no redirects
    client = httpx.Client(
        base_url=url.rstrip("/"),
        headers={"Accept-Encoding": "identity"},
        timeout=_LONGEST_SECONDS,
        trust_env=False,
    )
    action_key = arguments.get("action_key", "message")
    text_key = arguments.get("text_key")
    return Factory(lambda: OpenEnvironment(client, action_key, text_key), [], False)


# -- MCP


class McpServer:
    """A running server. A thread holds its connection for the life of this process."""

    def __init__(self, command: str) -> None:
        """Start the server. Raises ConfigError if it does not start or mcp is not installed."""
        self._command = command
        self._loop = asyncio.new_event_loop()
        self._client: Future[Any] = Future()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._connect(), self._loop)
        try:
            client = self._client.result(_START_SECONDS)
            page = self._wait(client.list_tools(cursor=None))
            self.tools = page.tools
            while page.next_cursor:
                page = self._wait(client.list_tools(cursor=page.next_cursor))
                self.tools += page.tools
        except Exception as error:  # raised by the library or by the server
            raise ConfigError(
                f"generate.turns.tools mcp:{printable(command)}",
                f"the server cannot be used: {type(error).__name__}: {printable(error)}",
                next="see that the command starts an MCP server, and that the package mcp is there",
            ) from error

    def call(self, name: str, /, **arguments: Any) -> str | list[dict[str, Any] | str]:
        """Return the text of a tool's answer; pictures and clips come before it in a list.

        Raises RuntimeError if the tool reports an error.
        """
        answer = self._wait(self._client.result().call_tool(name, arguments))
        files = [
            {"type": block.type, block.type: base64.b64decode(block.data)}
            for block in answer.content
            if block.type in MEDIA
        ]
        text = "\n".join(
            getattr(block, "text", f"({block.type})")
            for block in answer.content
            if block.type not in MEDIA
        )
        if answer.is_error:
            raise RuntimeError(text)
        return [*files, text] if files else text

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _connect(self) -> None:
        """Open the connection and hold it until this process ends."""
        try:
            from mcp import Client, StdioServerParameters

            program, *arguments = shlex.split(self._command)
            parameters = StdioServerParameters(command=program, args=arguments)
            async with Client(parameters) as client:
                self._client.set_result(client)
                await asyncio.Event().wait()
        except BaseException as error:
            if self._client.done():
                raise
            self._client.set_exception(error)


def open_mcp(command: str) -> list[Callable[..., Any]]:
    """Return the tools of the server that a command starts. Raises ConfigError."""
    server = McpServer(command)
    functions = []
    for tool in server.tools:
        function = partial(server.call, tool.name)
        function.schema = {
            "name": tool.name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        functions.append(function)
    return functions
