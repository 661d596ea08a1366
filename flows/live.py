"""How far the stages of a command are, on stderr: a live bar each on a terminal, and in a log a
line every 30 s.

    with shown_live():                                      # the command
        with followed(label, config, on_line) as on_line:   # each of its stages
            run_call(call, on_line=on_line)

Lines of a stage that only count are not printed one by one then; Prefect's pages get them as ever.
Outside `shown_live`, in a worker say, nothing is shown.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .stage_progress import StageProgress, only_counts

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 30.0
log = logging.getLogger("quiver")
_show: Callable[[str, StageProgress], AbstractContextManager] | None = None
"""What shows one stage while it runs. None: outside `shown_live`."""


@contextmanager
def shown_live() -> Iterator[None]:
    """The stages that run inside are shown; what is logged inside stands above their bars. Of a
    launcher's ranks the first shows them."""
    global _show  # noqa: PLW0603
    if os.environ.get("RANK", "0") != "0":
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
    """What takes the lines of a stage's child: it hands them on to `on_line`, and the stage is
    shown as `label` while it runs."""
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
    """Whether a line of a log is to be printed: not where it is a stage's that only counts."""
    return not (record.name.startswith("quiver.") and only_counts(record.getMessage()))


@contextmanager
def _logged(label: str, progress: StageProgress) -> Iterator[None]:
    """A line every SECONDS_BETWEEN_LINES."""
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
    """What shows a stage in a bar of its own; until the first one there is a bar that only
    moves."""
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
