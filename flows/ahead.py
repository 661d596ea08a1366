"""Work beside a flow's own: a thread that runs stages while the flow runs others, and that ends at
once with it.

Prefect's `.submit()` waits for its threads when a flow is cancelled, and would leave their children
behind. Here whatever ends the `with` block (an error, a cancel, Ctrl-C) stops the work first: the
runner ends its child. When the flow is killed outright, the child sees its lifeline close, as every
stage does.

    with run_ahead(lambda: sample(recipe, 2)) as ahead:
        optimize(recipe, 1)
        sampled = ahead.result()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import TypeVar

from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS, Stopped

_T = TypeVar("_T")


class Ahead(Future[_T]):
    """What comes of work in a thread of its own. `stop`, once set, is what its `is_stopped`
    says."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()


_STOP: ContextVar[threading.Event | None] = ContextVar("quiver_stop", default=None)


def is_stopped() -> bool:
    """Whether this work is not wanted any more; whatever waits asks it, and raises Stopped."""
    stop = _STOP.get()
    return stop is not None and stop.is_set()


@contextmanager
def run_ahead(work: Callable[[], _T]) -> Iterator[Ahead[_T]]:
    """`work()` in a thread of its own, in a copy of the caller's context. Its error is raised by
    the future's `result`, in the caller."""
    future: Ahead[_T] = Ahead()

    def run() -> None:
        _STOP.set(future.stop)
        try:
            future.set_result(work())
        except (Exception, Stopped) as error:  # raised where the result is asked for
            future.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True, name="ahead")
    thread.start()
    try:
        yield future
    finally:
        future.stop.set()
        # a child that ignores SIGTERM is killed after the grace
        thread.join(GRACE_SECONDS + 3)
