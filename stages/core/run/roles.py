"""The references that a stage is given, by role.

    refs = RequiredRefs("reward", {"rollouts": "arith/rollouts@3"})
    refs["policy"]             # ConfigError: no policy are given, only rollouts
    refs.require_asked()       # ConfigError for a role that the stage's `plan` did not ask for

Not of the spine: it only says which role is missing, or too many.
"""

from __future__ import annotations

from typing import Any

from quiver.schemas.errors import ConfigError, did_you_mean, printable

from .stage import Refs


class RequiredRefs(dict):
    """References by role. A missing role raises ConfigError with its name.

    The roles that a stage takes are those its `plan` asks for. So it asks for each, whatever the
    config; `require_asked` then refuses any other.
    """

    def __init__(self, stage: str, refs: Refs) -> None:
        super().__init__(refs)
        self._stage = stage
        self._asked: list[str] = []

    def __getitem__(self, role: str) -> str | list[str]:
        self._asked.append(role)
        return super().__getitem__(role)

    def get(self, role: str, default: Any = None) -> Any:
        self._asked.append(role)
        return super().get(role, default)

    def __contains__(self, role: object) -> bool:
        self._asked.append(role)
        return super().__contains__(role)

    def __missing__(self, role: str) -> str:
        others = f", only {printable(', '.join(self))}" if self else ""
        problem = f"no {role} are given{others}"
        raise ConfigError(f"stage {self._stage}", problem, next=f"name the {role}")

    def require_asked(self) -> None:
        """Raise ConfigError for a role that the stage did not ask for."""
        taken = sorted(set(self._asked))
        for role in self:
            if role not in taken:
                raise ConfigError(
                    f"stage {self._stage}",
                    f"takes {' and '.join(taken) or 'no references'}, not {printable(role)}"
                    + did_you_mean(role, taken),
                    next=f"leave {printable(role)} out, or correct its name",
                )
