"""Environments of a user's class with `step(turn)`, which answers each turn with a `Step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiver.stages.common.environments.environment import (
    Factory,
    Message,
    Row,
    Step,
    Turn,
    call_reset,
    read_opening,
    read_reward,
    read_step,
    waited,
)


class SteppingEnvironment:
    """Adapter of an object with a method `step`."""

    def __init__(self, made: Any) -> None:
        self._object = made

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Call `reset(**columns)` if the object has it; its result is the opening."""
        reset = getattr(self._object, "reset", None)
        return read_opening(None if reset is None else call_reset(reset, row, seed))

    def step(self, turn: Turn) -> Step:
        """Call `step(turn)` and check its result."""
        return read_step(waited(self._object.step(turn)))

    def finish(self) -> float | None:
        """Return the result of `get_reward()`, if any; it adds to the steps' rewards."""
        get_reward = getattr(self._object, "get_reward", None)
        return None if get_reward is None else read_reward(waited(get_reward()))

    def close(self) -> None:
        """Call `close()` if the object has it."""
        close = getattr(self._object, "close", None)
        if close is not None:
            waited(close())


def open_class(source: str, make: Callable[[], Any], probe: Any) -> Factory:
    """Return the maker of environments of such a class.

    The policy is shown its attribute `tools` if it has one (schemas or documented functions); the
    class itself answers the calls.
    """
    from quiver.stages.common.environments.tool_schemas import schema_of

    tools = [schema_of(tool, source) for tool in getattr(probe, "tools", ())]
    return Factory(lambda: SteppingEnvironment(make()), tools, False)
