"""The references that a stage is given, by role.

    refs = RequiredRefs("reward", {"rollouts": "arith/rollouts@3"})
    refs["policy"]             # ConfigError: no policy are given, only rollouts
    refs["rollouts"]           # LineageError unless it is a version of rollouts
    refs.require_asked()       # ConfigError for a role that the stage's `plan` did not ask for

Not of the spine: it only says which role is missing, of another kind, or too many.
"""

from __future__ import annotations

from typing import Any

from quiver.schemas.errors import ConfigError, LineageError, did_you_mean, printable
from quiver.schemas.refs import parse

from .stage import Refs

_KINDS = {"reference": "policy", "retry": "rewards", "baseline": "evaluations"}


def kind_of(role: str) -> str:
    """Return the kind of the versions that a role takes. Most roles are named by it.

    >>> kind_of("rollouts"), kind_of("ref_logprobs"), kind_of("retry")
    ('rollouts', 'logprobs', 'rewards')
    """
    return _KINDS.get(role, role.rpartition("_")[2])


class RequiredRefs(dict):
    """References by role. A missing role raises ConfigError with its name, and a version of
    another kind than the role's LineageError.

    The roles that a stage takes are those its `plan` asks for. So it asks for each, whatever the
    config; `require_asked` then refuses any other.
    """

    def __init__(self, stage: str, refs: Refs) -> None:
        super().__init__(refs)
        self._stage = stage
        self._asked: list[str] = []

    def __getitem__(self, role: str) -> str | list[str]:
        self._asked.append(role)
        return self._of_kind(role, super().__getitem__(role))

    def get(self, role: str, default: Any = None) -> Any:
        self._asked.append(role)
        return self._of_kind(role, super().get(role, default))

    def __contains__(self, role: object) -> bool:
        self._asked.append(role)
        return super().__contains__(role)

    def __missing__(self, role: str) -> str:
        others = f", only {printable(', '.join(self))}" if self else ""
        problem = f"no {role} are given{others}"
        raise ConfigError(f"stage {self._stage}", problem, next=f"name the {role}")

    def _of_kind(self, role: str, refs: Any) -> Any:
        kind = kind_of(role)
        for ref in refs if isinstance(refs, list) else [refs]:
            if ref and parse(ref).kind != kind:
                raise LineageError(printable(ref), f"is not a version of {kind}", next="quiver ls")
        return refs

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
