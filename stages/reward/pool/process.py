"""One worker process of the pool: what it may be asked, and what its answers look like.

worker = ScoringWorker(share_of_memory(workers=2))
worker.ask({"key": 1, "load": {…}}, 60, Loaded)    # or Late, Ended
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from quiver.stages.common.runtime.workers import Worker
from quiver.stages.reward.pool import worker
from quiver.stages.reward.pool.calls import About, memory_allowance
from quiver.stages.reward.scoring import LARGEST


class Loaded(BaseModel):
    """What a worker says of a function that it was to load."""

    about: About | None
    error: dict[str, str] | None
    """Why it could not be loaded."""


class Answer(BaseModel):
    """What a worker says of a call, or a piece of it."""

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
    """Of the whole call; None: more pieces come."""
    failure: str | None
    """Why the call on all rows failed and they were called one by one, where that is so."""


class ScoringWorker(Worker):
    """A process in which reward functions run (see `worker`)."""

    def __init__(self, memory_bytes: int) -> None:
        """`memory_bytes`: the most private memory that it may have."""
        self.last_calls: dict[Any, tuple[int, float]] = {}
        """By each function that it has loaded: rows and seconds of its last call here; no rows
        before the first."""
        super().__init__(
            worker.__name__,
            memory_bytes,
            name="reward worker",
            allowance=memory_allowance(memory_bytes),
            lower="reward.workers",
        )

    @property
    def has_called(self) -> bool:
        """Whether a call has been answered here."""
        return any(rows for rows, _ in self.last_calls.values())
