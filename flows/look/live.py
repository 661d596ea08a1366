"""Progress of a stage, parsed from the log lines of its child process, and shown live on stderr: a
bar for each stage on a terminal, else a line every 30 s.

    with shown_live():                                      # the command
        with followed(label, config, on_line) as on_line:   # each of its stages
            run_call(call, on_line=on_line)

Lines that only count progress are then not printed; Prefect's pages (`progress.py`) still get them.
Outside `shown_live`, for example in a worker, nothing is shown.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from quiver.stages.core.ranks import follows_rank_0

if TYPE_CHECKING:
    from rich.console import Console

SECONDS_BETWEEN_LINES = 30.0
_GRACE_SECONDS = 2.0
log = logging.getLogger("quiver")
_ROWS = re.compile(
    r"(?:generate|prompts|rewards|logprobs): (shard )?(\d+) of (\d+)\b"
    r"(?: rows, (\d+) tokens/s)?(?:  \[(.+)\])?"
)
_STEP = re.compile(r"step (\d+): (?:(\d+) of (\d+) micro-batches|loss)")


class StageProgress:
    """Work done and total of one stage, in words as its `str`. `config` is the stage's config.

    progress = StageProgress(call.config)
    progress.hear("generate: 256 of 512 rows, 900 tokens/s")
    str(progress)        # 256 of 512 rows, 900 tokens/s, 40 s left
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._steps = config.get("epochs", 1) * config.get("minibatches", 1)
        self._first_step: int | None = None
        self._started_at = time.monotonic()
        self._first: tuple[float, float] | None = None
        """Time of the first progress line, and the work done by then."""
        self._latest_at = 0.0
        self._speeds: dict[str | None, int] = {}
        """Tokens/s of each process of the stage, by the name at the end of its lines."""
        self.done = 0.0
        self.total: float | None = None
        """Total of `done`; None before the first progress line."""
        self.unit = "rows"
        self.line = ""
        """The last progress line."""

    def hear(self, line: str) -> None:
        """Parse a line; lines without progress are ignored."""
        rows = _ROWS.match(line)
        step = _STEP.match(line)
        if rows:
            # With several processes, each counts its current shard and all finished rows.
            self.done = max(float(rows[2]), self.done if rows[5] else 0.0)
            self.total = float(rows[3])
            self.unit = "shards" if rows[1] else "rows"
            if rows[4]:
                self._speeds[rows[5]] = int(rows[4])
        elif step:
            number = int(step[1])
            if self._first_step is None:
                self._first_step = number
            share = int(step[2]) / int(step[3]) if step[2] else 1
            self.done = number - self._first_step + share
            self.total = self._steps
            self.unit = "steps"
        else:
            return
        self.line = line
        self._latest_at = time.monotonic()
        if self._first is None:
            self._first = (self._latest_at, self.done)

    def __str__(self) -> str:
        """Return rows done of all, tokens/s and time left, as far as they are known."""
        if self.total is None or self._first is None:
            return f"{in_words(time.monotonic() - self._started_at)} so far"
        words = [f"{int(self.done):,} of {int(self.total):,} {self.unit}"]
        if self._speeds:
            words.append(f"{sum(self._speeds.values())} tokens/s")
        first_at, first_done = self._first
        if self.done > first_done:
            pace = (self._latest_at - first_at) / (self.done - first_done)
            due_at = self._latest_at + pace * (self.total - self.done)
            words.append(f"{in_words(max(0.0, due_at - time.monotonic()))} left")
        return ", ".join(words)


def only_counts(line: str) -> bool:
    """True if a line shows only how far its stage is.

    >>> only_counts("rewards: 256 of 512 rows"), only_counts("step 0: loss 0.1, grad_norm 1.0")
    (True, False)
    """
    step = _STEP.match(line)
    return _ROWS.match(line) is not None or (step is not None and step[2] is not None)


def in_words(seconds: float) -> str:
    """Return a duration for people.

    >>> in_words(9.6), in_words(75), in_words(7300)
    ('10 s', '1 min 15 s', '2 h 2 min')
    """
    minutes, seconds = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{seconds} s"
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


# -- on stderr

_show: Callable[[str, StageProgress], AbstractContextManager[Callable[[], None]]] | None = None
"""Function that shows one stage while it runs, and yields what to call after each of its lines.
None: outside `shown_live`."""


@contextmanager
def shown_live() -> Iterator[None]:
    """Show the stages that run inside; log lines are printed above their bars.

    Of a launcher's ranks only the first shows them.
    """
    global _show  # noqa: PLW0603
    if follows_rank_0():
        yield
        return
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    root = logging.getLogger()
    handlers = [handler for handler in root.handlers if hasattr(handler, "setStream")]
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
    with _show(label, progress) as refresh:

        def hear(line: str) -> None:
            progress.hear(line)
            refresh()
            on_line(line)

        yield hear


@contextmanager
def regularly(seconds: float, action: Callable[[], None], name: str) -> Iterator[threading.Thread]:
    """Call `action` every `seconds` in a thread, which is yielded. At the end, wait 2 s for it."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            action()

    thread = threading.Thread(target=copy_context().run, args=(repeat,), daemon=True, name=name)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join(_GRACE_SECONDS)


def _is_news(record: logging.LogRecord) -> bool:
    """True if a log line should be printed: all but a stage's lines that only count progress."""
    return not (record.name.startswith("quiver.") and only_counts(record.getMessage()))


@contextmanager
def _logged(label: str, progress: StageProgress) -> Iterator[Callable[[], None]]:
    """Log a line every SECONDS_BETWEEN_LINES."""
    with regularly(SECONDS_BETWEEN_LINES, lambda: log.info("%s: %s", label, progress), "live"):
        yield lambda: None


class _Above:
    """A stream that prints above the bars of a console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> None:
        self._console.print(text, end="", soft_wrap=True)

    def flush(self) -> None: ...


@contextmanager
def _bars(
    console: Console,
) -> Iterator[Callable[[str, StageProgress], AbstractContextManager[Callable[[], None]]]]:
    """Yield a function that shows a stage in its own bar; before the first one, one bar pulses."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    words = Column(no_wrap=True, overflow="ellipsis")
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[progress]}", markup=False, style="", table_column=words),
        console=console,
        transient=True,
        redirect_stdout=False,
        refresh_per_second=4,
    )

    @contextmanager
    def bar(label: str, progress: StageProgress) -> Iterator[Callable[[], None]]:
        bars.update(getting_ready, visible=False)
        number = bars.add_task(label, total=None, progress=progress)
        try:
            yield lambda: bars.update(number, total=progress.total, completed=progress.done)
        finally:
            bars.remove_task(number)

    with bars:
        getting_ready = bars.add_task("getting ready", total=None, progress=StageProgress({}))
        yield bar
