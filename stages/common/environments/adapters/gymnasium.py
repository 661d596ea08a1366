"""Text environments of gymnasium: the turn's text is the action, the observation is read as a
message of the user.

Where the action space has numbered actions (`Discrete`) the last whole number of the turn's text is
the action; a turn without one, or with one that the space lacks, is told so and changes nothing.
`reset(seed, options)` gets the row as options.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.environments.environment import (
    Factory,
    Message,
    Row,
    Step,
    Turn,
    read_opening,
    read_step,
    read_text,
)


class GymEnvironment:
    """One environment of gymnasium's."""

    def __init__(self, made: Any) -> None:
        self._object = made

    def reset(self, row: Row, seed: int) -> list[Message]:
        """The first observation is the opening."""
        observation, _ = self._object.reset(seed=seed % 2**32, options=row)
        return read_opening(_as_text(observation))

    def step(self, turn: Turn) -> Step:
        """The turn's text as an action."""
        action: Any = turn.text.strip()
        space = self._object.action_space
        if hasattr(space, "n"):
            numbers = re.findall(r"-?\d{1,18}", turn.text)
            action = int(numbers[-1]) if numbers else None
        if action is None or not space.contains(action):
            return Step(text=f"{turn.text.strip()[:200]!r} is no action here")
        observation, reward, is_over, is_cut, info = self._object.step(action)
        return read_step(
            {
                "text": _as_text(observation),
                "reward": reward,
                "done": is_over or is_cut,
                "info": info or None,
            }
        )

    def finish(self) -> float | None:
        """None: its rewards are of steps."""
        return None

    def close(self) -> None:
        """As gymnasium has it."""
        self._object.close()


def _as_text(observation: Any) -> str:
    return read_text(observation.tolist() if hasattr(observation, "tolist") else observation)


def open_class(source: str, make: Callable[[], Any], probe: Any) -> Factory:
    """Environments of a user's class."""
    probe.close()
    return Factory(lambda: GymEnvironment(make()), [], False)


def open_environment(name: str, arguments: dict[str, Any]) -> Factory:
    """Environments that are registered under a name. ConfigError where gymnasium, or that name, is
    not there."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"generate.turns.environment gymnasium:{printable(name)}",
            "gymnasium is not installed",
            next="pip install gymnasium",
        ) from error
    try:
        probe = gymnasium.make(name, **arguments)
    except Exception as error:  # an environment's own code, too
        raise ConfigError(
            f"generate.turns.environment gymnasium:{printable(name)}",
            f"cannot be made: {type(error).__name__}: {printable(error)}",
            next="correct generate.turns.environment or its arguments",
        ) from error
    return open_class(name, lambda: gymnasium.make(name, **arguments), probe)
