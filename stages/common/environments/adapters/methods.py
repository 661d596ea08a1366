"""Tools: plain functions, or the public methods of a class as in TRL's `environment_factory`.

    class Counter:
        def reset(self, start, **columns):            # a text is the opening
            self.number = start

        def add(self, amount: int) -> str:            # a tool, its docstring the schema
            …

        def get_reward(self):                         # or an attribute `reward`
            return float(self.number == 12)

If a tool raises, the policy reads the error. A turn without calls is the answer.
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
    """Tools that keep no state between calls."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        self._functions = functions

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Return no opening messages."""
        return []

    def step(self, turn: Turn) -> Step:
        """Run the turn's calls, one after another."""
        return Step(messages=[call_tool(self._functions, call) for call in turn.calls])

    def finish(self) -> float | None:
        """Return None, because tools give no reward."""
        return None

    def close(self) -> None:
        """Do nothing, because there is nothing to release."""


class MethodEnvironment(ToolEnvironment):
    """An object of a user's class whose public methods are the tools."""

    def __init__(self, made: Any) -> None:
        super().__init__(tool_methods(made))
        self._object = made

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Call `reset(**columns)` if the object has it; its result is the opening."""
        reset = getattr(self._object, "reset", None)
        return read_opening(None if reset is None else call_reset(reset, row, seed))

    def finish(self) -> float | None:
        """Return the result of `get_reward()`, or without that method the attribute `reward`."""
        get_reward = getattr(self._object, "get_reward", None)
        if get_reward is not None:
            return read_reward(waited(get_reward()))
        return read_reward(getattr(self._object, "reward", None))

    def close(self) -> None:
        """Call `close()` if the object has it."""
        close = getattr(self._object, "close", None)
        if close is not None:
            waited(close())


def open_class(source: str, make: Callable[[], Any], probe: Any) -> Factory:
    """Return the maker of environments of a class of tools; `probe` is one object of it.

    Raises ConfigError if it has no tools, or if a tool has no usable schema.
    """
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
