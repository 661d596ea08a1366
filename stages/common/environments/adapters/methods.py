"""Tools: plain functions, or the public methods of a class as TRL's `environment_factory` takes it.

    class Counter:
        def reset(self, start, **columns):            # a text is the opening
            self.number = start

        def add(self, amount: int) -> str:            # a tool, its docstring the schema
            …

        def get_reward(self):                         # or an attribute `reward`
            return float(self.number == 12)

What a tool raises is told to the policy. A turn without calls is the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.environments.environment import (
    Factory,
    Message,
    Row,
    Step,
    Turn,
    call_reset,
    call_tool,
    read_opening,
    read_reward,
    waited,
)
from quiver.stages.common.environments.tool_schemas import schema_of, tool_methods


class ToolEnvironment:
    """Functions without a state between their calls."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._functions = functions

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Nothing."""
        return []

    def step(self, turn: Turn) -> Step:
        """Make the calls, one after another."""
        return Step(messages=[call_tool(self._functions, call) for call in turn.calls])

    def finish(self) -> float | None:
        """None: tools pay nothing."""
        return None

    def close(self) -> None:
        """Nothing is held."""


class MethodEnvironment(ToolEnvironment):
    """An object of a user's class, whose public methods are the tools."""

    def __init__(self, made: Any) -> None:
        super().__init__(tool_methods(made))
        self._object = made

    def reset(self, row: Row, seed: int) -> list[Message]:
        """`reset(**columns)`; a text that it returns is the opening."""
        reset = getattr(self._object, "reset", None)
        return read_opening(None if reset is None else call_reset(reset, row, seed))

    def finish(self) -> float | None:
        """What `get_reward()` returns; without it the number that the attribute `reward` is."""
        get_reward = getattr(self._object, "get_reward", None)
        if get_reward is not None:
            return read_reward(waited(get_reward()))
        return read_reward(getattr(self._object, "reward", None))

    def close(self) -> None:
        """`close()`, where there is one."""
        close = getattr(self._object, "close", None)
        if close is not None:
            waited(close())


def open_class(source: str, make: Callable[[], Any], probe: Any) -> Factory:
    """Environments of a class of tools; `probe` is one object of it. ConfigError."""
    methods = tool_methods(probe)
    if not methods:
        raise ConfigError(
            f"generate.turns.environment {printable(source)}",
            "has neither a method `step` nor any public method that is a tool",
            next="give it one",
        )
    tools = [schema_of(method, source) for method in methods.values()]
    for name, tool in zip(methods, tools, strict=True):
        if tool["function"]["name"] != name:
            raise ConfigError(
                f"tool {printable(name)} of {printable(source)}",
                f"its own schema has the name {printable(tool['function']['name'])}",
                next="give both the same name",
            )
    return Factory(lambda: MethodEnvironment(make()), tools, True)
