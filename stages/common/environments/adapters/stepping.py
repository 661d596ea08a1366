"""A user's class with `step(turn)`: it reads what the policy said and answers with a `Step`."""

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
    """An object of such a class."""

    def __init__(self, made: Any) -> None:
        self._object = made

    def reset(self, row: Row, seed: int) -> list[Message]:
        """`reset(**columns)`, where there is one; what it returns is the opening."""
        reset = getattr(self._object, "reset", None)
        return read_opening(None if reset is None else call_reset(reset, row, seed))

    def step(self, turn: Turn) -> Step:
        """`step(turn)`."""
        return read_step(waited(self._object.step(turn)))

    def finish(self) -> float | None:
        """What `get_reward()` returns, where there is one, beside the rewards of steps."""
        get_reward = getattr(self._object, "get_reward", None)
        return None if get_reward is None else read_reward(waited(get_reward()))

    def close(self) -> None:
        """`close()`, where there is one."""
        close = getattr(self._object, "close", None)
        if close is not None:
            waited(close())


def open_class(source: str, make: Callable[[], Any], probe: Any) -> Factory:
    """Environments of such a class. An attribute `tools` of it, schemas or documented functions, is
    what the policy is shown; the class itself answers the calls."""
    from quiver.stages.common.environments.tool_schemas import schema_of

    tools = [schema_of(tool, source) for tool in getattr(probe, "tools", ())]
    return Factory(lambda: SteppingEnvironment(make()), tools, False)
