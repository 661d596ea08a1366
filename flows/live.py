"""Live progress of a command's stages on stderr: a bar each on a terminal, else a line every 30 s.

    with shown_live():                                      # the command
        with followed(label, config, on_line) as on_line:   # each of its stages
            run_call(call, on_line=on_line)

Lines that only count progress are then not printed; Prefect's pages still get them. Outside
`shown_live`, for example in a worker, nothing is shown.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from quiver.stages.common.launched import is_led

from .stage_progress import StageProgress, only_counts

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 30.0
log = logging.getLogger("quiver")
_show: Callable[[str, StageProgress], AbstractContextManager] | None = None
"""Function that shows one stage while it runs. None: outside `shown_live`."""


@contextmanager
def shown_live() -> Iterator[None]:
    """Show the stages that run inside; log lines are printed above their bars.

    Of a launcher's ranks only the first shows them.
    """
    global _show  # noqa: PLW0603
    if is_led():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    handlers = [each for each in logging.getLogger().handlers if hasattr(each, "setStream")]
    for handler in handlers:
        handler.addFilter(_is_news)
    try:
        if sys.stderr.isatty() and not console.is_dumb_terminal:
            streams = [handler.setStream(_Above(console)) for handler in handlers]
            try:
                with _bars(console) as _show:
                    yield
            finally:
                for handler, stream in zip(handlers, streams, strict=True):
                    handler.setStream(stream)
        else:
            _show = _logged
            yield
    finally:
        _show = None
        for handler in handlers:
            handler.removeFilter(_is_news)


@contextmanager
def followed(
    label: str, config: dict[str, Any], on_line: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """Yield a function that passes a stage's lines on to `on_line`, while the stage is shown as
    `label`."""
    if _show is None:
        yield on_line
        return
    progress = StageProgress(config)

    def hear(line: str) -> None:
        progress.hear(line)
        on_line(line)

    with _show(label, progress):
        yield hear


def _is_news(record: logging.LogRecord) -> bool:
    """True if a log line should be printed: all but a stage's lines that only count progress."""
    return not (record.name.startswith("quiver.") and only_counts(record.getMessage()))


@contextmanager
def _logged(label: str, progress: StageProgress) -> Iterator[None]:
    """Log a line every SECONDS_BETWEEN_LINES."""
    ended = threading.Event()

    def log_regularly() -> None:
        while not ended.wait(SECONDS_BETWEEN_LINES):
            log.info("%s: %s", label, progress.words())

    threading.Thread(target=log_regularly, daemon=True, name="live").start()
    try:
        yield
    finally:
        ended.set()


class _Above:
    """A stream that prints above the bars of a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> None:
        self._console.print(text, end="", soft_wrap=True)

    def flush(self) -> None: ...


@contextmanager
def _bars(console: Console) -> Iterator[Callable[[str, StageProgress], AbstractContextManager]]:
    """Yield a function that shows a stage in its own bar; before the first one, one bar pulses."""
    from rich.progress import Progress, ProgressColumn, Task, TextColumn
    from rich.progress_bar import ProgressBar
    from rich.table import Column
    from rich.text import Text

    class Bar(ProgressColumn):
        def render(self, task: Task) -> ProgressBar:
            progress = task.fields["progress"]
            return ProgressBar(
                total=progress.total,
                completed=progress.done,
                width=16,
                pulse=progress.total is None,
                animation_time=task.get_time(),
            )

    class Words(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.fields["progress"].words())

    bars = Progress(
        TextColumn("{task.description}", markup=False),
        Bar(),
        Words(table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=console,
        transient=True,
        redirect_stdout=False,
        refresh_per_second=4,
    )

    @contextmanager
    def bar(label: str, progress: StageProgress) -> Iterator[None]:
        bars.update(getting_ready, visible=False)
        number = bars.add_task(label, total=None, progress=progress)
        try:
            yield
        finally:
            bars.remove_task(number)

    with bars:
        getting_ready = bars.add_task("getting ready", total=None, progress=StageProgress({}))
        yield bar
