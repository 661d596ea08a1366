"""One call of a stage: the only object that travels from a flow to the process that does the work.

    call = Call("reward", config, "store", {"rollouts": "arith/rollouts@3"}, into="arith")
    assert Call.from_json(json.loads(json.dumps(call.to_json()))) == call

A pool receives it as JSON with the same fields, a child process as the file `call.json`, and an
`Outcome` comes back.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from typing import Any, ClassVar, Literal

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import problem_of

MOST_OF_NOTE = 1000
"""Most characters of a note."""
_FORM = {"use_attribute_docstrings": True, "extra": "forbid"}
"""Config of pydantic, with which Prefect describes the fields in the form of a flow."""


@cache
def quiver_version() -> str:
    """Return the version of this program."""
    return metadata.version("quiver-rl")


@dataclass(frozen=True)
class Where:
    """Where a call runs and within which limits.

    In a flow, `calls.perform` builds the call, and `placement.where_of` fills this in from
    [placement]; in `run_stage` all fields have their defaults. Whatever runs the call then works on
    a copy. For the workers of a pool, `pool.for_workers` sets `store_id`, and drops `pool` and
    `resident_engine`. `dispatch._run_together` drops `resident_engine`, and counts
    `timeout_seconds` from the start of the first process. A call by hand (`calls.run_here`)
    has no `resident_engine` either.
    """

    __pydantic_config__: ClassVar = _FORM
    pool: str | None = None
    """Prefect work pool whose workers run it. Default: this host."""
    workers: int | None = None
    """Number of workers that share the call in a pool. Default: all that are online."""
    wait_seconds: float = 600
    """Seconds to wait for a worker if the pool has none online."""
    store_id: str = ""
    """Id that store.json must hold, so that an unmounted folder is not taken for a new store.
    Empty: any id."""
    python: str | None = None
    """Interpreter of the child process. Default: the one that starts it."""
    timeout_seconds: float | None = None
    """Wall-clock limit, in seconds."""
    online: bool = False
    """If true, the stage may reach a model hub."""
    slots: int = 0
    """Heavy stages at once on a host without GPU. 0: any number."""
    devices: Literal["all"] | int | None = None
    """Number of the host's devices that the stage may use, with one process per model copy.
    Default: one process."""
    concurrency_limit: str | None = None
    """Global concurrency limit of the server; the stage holds one slot of it."""
    resident_engine: bool = False
    """`placement.resident_engine`, for generate. If true, the child stays resident after its answer
    and its engine sleeps until the next such call."""


@dataclass(frozen=True)
class Call:
    """One call of a stage."""

    __pydantic_config__: ClassVar = _FORM
    stage: str
    """Name of the stage."""
    config: dict[str, Any]
    """The stage's config in plain JSON."""
    store: str
    """Folder or URL of the store, the same on every host."""
    refs: dict[str, str | list[str]] = field(default_factory=dict)
    """References of the versions to read, by role."""
    into: str | None = None
    """Run to write into. Default: the inputs' run."""
    force: bool = False
    """Make a new version, even if a finished one exists."""
    share: bool = False
    """Equal calls, any number on any hosts that see the store, share the work; each returns the
    version. A call that fails leaves its shards to the others."""
    label: str = "stage"
    """Name of the call in logs."""
    note: str = ""
    """The user's words for the manifest of a version that this call makes."""
    where: Where = Where()
    """Where it runs."""
    quiver: str = field(default_factory=quiver_version)
    """Version of the program that built the call; a process of another version refuses it."""

    def __post_init__(self) -> None:
        problem = problem_of(self.note) if isinstance(self.note, str) else "must be a text"
        if problem or len(self.note) > MOST_OF_NOTE:
            problem = problem or f"has {len(self.note)} characters, at most {MOST_OF_NOTE} are kept"
            raise ConfigError("note", problem, next="write a shorter, plain text")

    def to_json(self) -> dict[str, Any]:
        """Return the call in plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Call:
        """Read a call written by `to_json`. Raises ConfigError if another version wrote it."""
        require_version(sys.executable, quiver_version(), fields.get("quiver"))
        return cls(**{**fields, "where": Where(**fields.get("where", {}))})


@dataclass(frozen=True)
class Outcome:
    """The result of a call. `rows` and `metrics` are the manifest's.

    `cached` is true if this call did not commit the version; then `seconds` are the manifest's.
    Otherwise they are the time that the call took. A call in a pool counts as not cached, because
    its workers do whatever is left to do.
    """

    ref: str
    cached: bool
    rows: int
    seconds: float
    metrics: dict[str, Any]


def require_version(python: str, version: str | None, expected: str | None) -> None:
    """Raise ConfigError unless interpreter `python` has the caller's version of this program.

    Args:
        version: the version that `python` has.
        expected: the caller's version.
    """
    if version != expected:
        raise ConfigError(
            f"interpreter {python}",
            f"has Quiver {printable(version)}, expected {printable(expected)}",
            next="install the same version in both environments",
        )
