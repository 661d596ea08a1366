"""Progress of a running stage on Prefect's pages, parsed from the log lines of its child process.

    with progress(call, log.info) as on_line:
        outcome = run_call(call, on_line=on_line)

A thread posts to the server every few seconds, and only changes. So a slow or missing server does
not delay the stage, and a stage that finishes sooner leaves no artifact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext

from quiver.stages.common.runtime.call import Call
from quiver.stages.report.templates import quoted

from .pages.failures import attempt
from .pages.text import key
from .stage_progress import StageProgress

SECONDS_BETWEEN = 5.0
_GRACE_SECONDS = 2.0


@contextmanager
def progress(call: Call, on_line: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes the lines of the child that runs `call`.

    It passes them on to `on_line`, and shows the stage's progress.
    """
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        yield on_line  # Without a run there is no page.
        return
    bar = Bar(call)
    ended = threading.Event()

    def hear(line: str) -> None:
        on_line(line)
        bar.hear(line)

    def post_regularly() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            bar.post()

    thread = threading.Thread(
        target=copy_context().run, args=(post_regularly,), daemon=True, name="progress"
    )
    thread.start()
    try:
        yield hear
    finally:
        ended.set()
        thread.join(_GRACE_SECONDS)
    # It is alive if the server does not answer; then the last progress is lost.
    if not thread.is_alive():
        bar.finish()


class Bar:
    """Progress of one stage in percent, and its artifact once it exists."""

    def __init__(self, call: Call) -> None:
        self._name = key(f"progress-{call.stage}", call.into or "run")
        self._stage = StageProgress(call.config)
        self._is_over = False
        self._posted = (self.percent, self._stage.line)
        self._id: UUID | None = None

    def hear(self, line: str) -> None:
        """Parse a line; lines without progress are ignored."""
        self._stage.hear(line)

    @property
    def percent(self) -> float:
        """Progress of the stage in percent, by the last progress line."""
        if self._is_over:
            return 100.0
        return min(100.0, 100.0 * self._stage.done / max(self._stage.total or 1, 1))

    def finish(self) -> None:
        """Mark the stage as complete, if its progress was shown at all."""
        if self._id is not None:
            self._is_over = True
            self.post()

    def post(self) -> None:
        """Create or update the artifact if there is news. Never raises."""
        news = (self.percent, self._stage.line)
        if news == self._posted:
            return
        with attempt(f"the progress of {self._name}"):
            percent = round(self.percent, 1)
            text = quoted(self._stage.line)
            if self._id is None:
                self._id = create_progress_artifact(percent, key=self._name, description=text)
            else:
                update_progress_artifact(self._id, percent, description=text)
            self._posted = news
