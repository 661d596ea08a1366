"""Log lines and progress of running stages on Prefect's pages.

Importing this module makes the logger `quiver` write to the current flow run, too. Progress is
parsed from the log lines of a stage's child process.

    with progress(call, log.info) as on_line:
        outcome = run_call(call, on_line=on_line)

A thread posts to the server every few seconds, and only changes. So a slow or missing server does
not delay the stage, and a stage that finishes sooner leaves no artifact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

from quiver.flows.look.templates import quoted
from quiver.stages.core.run.call import Call

from .look.live import StageProgress, regularly
from .look.pages.text import attempt, key

SECONDS_BETWEEN = 5.0
_log = logging.getLogger("quiver")
_to_server = APILogHandler()
# Outside a flow run, a line belongs to no run.
_to_server.addFilter(lambda line: FlowRunContext.get() is not None)
_log.addHandler(_to_server)
if _log.level == logging.NOTSET:  # A worker's process has not set a level.
    _log.setLevel(logging.INFO)


@contextmanager
def progress(call: Call, on_line: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Yield a function that takes the lines of the child that runs `call`.

    It passes them on to `on_line`, and shows the stage's progress.
    """
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        yield on_line  # Without a run there is no page.
        return
    bar = Bar(call)

    def hear(line: str) -> None:
        on_line(line)
        bar.hear(line)

    with regularly(SECONDS_BETWEEN, bar.post, "progress") as thread:
        yield hear
    # It is alive if the server does not answer; then the last progress is lost.
    if not thread.is_alive():
        bar.finish()


class Bar:
    """Progress of one stage in percent, and its artifact once it exists."""

    def __init__(self, call: Call) -> None:
        self._name = key(f"progress-{call.stage}", call.into or "run")
        self._stage = StageProgress(call.config)
        self.hear = self._stage.hear
        self._posted = (0.0, "")
        self._id: UUID | None = None

    @property
    def percent(self) -> float:
        """Progress of the stage in percent, by the last progress line."""
        return min(100.0, 100.0 * self._stage.done / max(self._stage.total or 1, 1))

    def finish(self) -> None:
        """Mark the stage as complete, if its progress was shown at all."""
        if self._id is not None:
            self._stage.done = self._stage.total
            self.post()

    def post(self) -> None:
        """Create or update the artifact if there is news. Never raises."""
        news = (round(self.percent, 1), quoted(self._stage.line))
        if news == self._posted:
            return
        with attempt(f"the progress of {self._name}"):
            percent, text = news
            if self._id is None:
                self._id = create_progress_artifact(percent, key=self._name, description=text)
            else:
                update_progress_artifact(self._id, percent, description=text)
            self._posted = news
