"""One worker process of the pool: its requests, and the form of its answers.

worker = ScoringWorker(share_of_memory(workers=2))
worker.ask({"key": 1, "load": {…}}, 60, Loaded)    # or raises Late, Ended
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from quiver.stages.common.runtime.workers import Worker
from quiver.stages.reward.pool import worker
from quiver.stages.reward.pool.calls import About, memory_allowance
from quiver.stages.reward.scoring import LARGEST


class Loaded(BaseModel):
    """A worker's answer to a request to load a function."""

    about: About | None
    error: dict[str, str] | None
    """Reason why it could not be loaded."""


class Answer(BaseModel):
    """A worker's answer to a call, or a piece of it."""

    parts: list[
        tuple[
            Annotated[int, Field(ge=0)],
            Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | None,
            str | None,
            str | None,
        ]
    ]
    """Row, value, error, extra."""
    seconds: Annotated[float, Field(ge=0)] | None
    """Seconds of the whole call. None: more pieces follow."""
    failure: str | None
    """Reason why the call on all rows failed, if the rows were then called one by one."""


class ScoringWorker(Worker):
    """A process in which reward functions run (see `worker`)."""

    def __init__(self, memory_bytes: int) -> None:
        """Start the process with at most `memory_bytes` of private memory."""
        self.last_calls: dict[Any, tuple[int, float]] = {}
        """Rows and seconds of the last call here, for each function that it has loaded; 0 rows
        before the first call."""
        super().__init__(
            worker.__name__,
            memory_bytes,
            name="reward worker",
            allowance=memory_allowance(memory_bytes),
            lower="reward.workers",
        )

    @property
    def has_called(self) -> bool:
        """True if a call has been answered here."""
        return any(rows for rows, _ in self.last_calls.values())
