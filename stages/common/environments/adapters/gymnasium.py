"""Text environments of gymnasium: a turn's text is the action, the observation a user message.

If actions are numbers (a `Discrete` action space), the last whole number in the turn's text is the
action. A turn without a valid number changes nothing; the policy reads that it was no action.
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
    """Adapter of one gymnasium environment."""

    def __init__(self, made: Any) -> None:
        self._object = made

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Reset the environment; its first observation is the opening."""
        observation, _ = self._object.reset(seed=seed % 2**32, options=row)
        return read_opening(_as_text(observation))

    def step(self, turn: Turn) -> Step:
        """Take the turn's text as an action."""
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
        """Return None, because gymnasium rewards steps only."""
        return None

    def close(self) -> None:
        """Close the gymnasium environment."""
        self._object.close()


def _as_text(observation: Any) -> str:
    return read_text(observation.tolist() if hasattr(observation, "tolist") else observation)


def open_class(source: str, make: Callable[[], Any], probe: Any) -> Factory:
    """Return the maker of environments of a user's class; `probe` is closed."""
    probe.close()
    return Factory(lambda: GymEnvironment(make()), [], False)


def open_environment(name: str, arguments: dict[str, Any]) -> Factory:
    """Return the maker of environments registered under a name.

    Raises ConfigError if gymnasium is not installed, or if the environment cannot be made.
    """
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
    except Exception as error:  # making it runs the environment's own code
        raise ConfigError(
            f"generate.turns.environment gymnasium:{printable(name)}",
            f"cannot be made: {type(error).__name__}: {printable(error)}",
            next="correct generate.turns.environment or its arguments",
        ) from error
    return open_class(name, lambda: gymnasium.make(name, **arguments), probe)
