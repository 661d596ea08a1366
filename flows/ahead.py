"""A thread that runs stages while the flow runs others, and that ends together with the flow.

Look here for `overlap`, and for how work is stopped. Prefect's `.submit()` waits for its threads
when a flow is cancelled, and would leave their children behind. Here anything that ends the `with`
block (an error, a cancel, Ctrl-C) stops the work first: the runner ends its child. If the flow is
killed outright, the child sees its lifeline close, as every stage does.

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
    """The future result of work in another thread. Setting `stop` makes `is_stopped` true there."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()


_STOP: ContextVar[threading.Event | None] = ContextVar("quiver_stop", default=None)


def is_stopped() -> bool:
    """True if this work was stopped. Code that waits checks it and raises Stopped."""
    stop = _STOP.get()
    return stop is not None and stop.is_set()


@contextmanager
def run_ahead(work: Callable[[], _T]) -> Iterator[Ahead[_T]]:
    """Run `work()` in a thread, in a copy of the caller's context.

    `result` of the future raises its error in the caller.
    """
    future: Ahead[_T] = Ahead()

    def run() -> None:
        _STOP.set(future.stop)
        try:
            future.set_result(work())
        except (Exception, Stopped) as error:  # Raised where the result is asked for.
            future.set_exception(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True, name="ahead")
    thread.start()
    try:
        yield future
    finally:
        future.stop.set()
        # A child that ignores SIGTERM is killed after the grace period.
        thread.join(GRACE_SECONDS + 3)
