"""Work beside a flow's own: a thread that runs stages while the flow runs others, and that ends at
once with it.

Prefect's `.submit()` waits for its threads when a flow is cancelled, and would leave their children
behind. Here whatever ends the `with` block (an error, a cancel, Ctrl-C) stops the work first: the
runner ends its child. When the flow is killed outright, the child sees its lifeline close, as every
stage does.

    with Ahead(lambda: sample(recipe, 2)) as sampling:
        optimize(recipe, 1)
        sampled = sampling.result()
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Generic, TypeVar

from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS, Stopped

_T = TypeVar("_T")
_STOP: ContextVar[threading.Event | None] = ContextVar("quiver_stop", default=None)


def is_ahead() -> bool:
    """Whether this is the work that runs beside the flow's own."""
    return _STOP.get() is not None


def is_stopped() -> bool:
    """Whether this work is not wanted any more; stages ask it while they wait."""
    stop = _STOP.get()
    return stop is not None and stop.is_set()


class Ahead(Generic[_T]):
    """`work()` in a thread of its own, in a copy of the caller's context. Its error is raised by
    `result`, in the caller."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._stop = threading.Event()
        context = copy_context()
        context.run(_STOP.set, self._stop)
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), daemon=True, name="ahead"
        )

    def __enter__(self) -> Ahead[_T]:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        # a child that ignores SIGTERM is killed after the grace
        self._thread.join(GRACE_SECONDS + 3)

    def result(self) -> _T:
        """Wait for the work; what it returned, or raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._answer

    def _run(self) -> None:
        try:
            self._answer = self._work()
        except (Exception, Stopped) as error:  # raised where the result is asked for
            self._error = error
