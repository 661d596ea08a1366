"""How work is stopped: by SIGINT or SIGTERM, with its worker, or with the flow that it belongs to.
Look here if Ctrl-C hangs or ends too hard, and for `overlap`.

A command ends within STOP_SECONDS of the first signal, and at once at the second, with the exit
code of that signal. The first signal ends it in order: it unwinds, its stages get SIGTERM and some
seconds, and Prefect is informed. Any of this may hang, and Python's own handlers wait for the main
thread, which may be in C code; so a thread watches. Processes that the command started end with it:
each has a keeper, which sees its lifeline close (`stages.core.processes.keeper`).

A flow run ends with the worker that started it. Prefect's workers leave their flow processes
running when they are killed; nothing could cancel such a run any more, while another run takes its
place. So a thread checks every second if the parent is still the first one. If not, the flow gets
SIGTERM, as on a cancel, and ends its stage. The flow may hang there, since it first informs the
server, which may be gone too. Then SIGKILL follows.

With `overlap`, a thread runs stages while the flow runs others. Prefect's `.submit()` waits for its
threads when a flow is cancelled, and would leave their children behind. Here anything that ends the
`with` block (an error, a cancel, Ctrl-C) stops the work first: the runner ends its child. If the
flow is killed outright, the child sees its lifeline close, as every stage does.

    with run_ahead(lambda: sample(recipe, 2)) as ahead:
        optimize(recipe, 1)
        sampled = ahead.result()
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from pathlib import Path
from types import FrameType
from typing import TypeVar

from quiver.stages.core.processes import subprocesses
from quiver.stages.core.processes.subprocesses import Stopped

_T = TypeVar("_T")

STOP_SECONDS = 9.0
TOGETHER_SECONDS = 0.5
"""Signals within this time count as one: `timeout` signals the command and then its group."""
POLL_SECONDS = 1
"""Time between two looks at the worker."""
GRACE_SECONDS = 15
"""Time that a flow without worker has to end by itself."""
_signals: list[int] = []
"""The signals that count, oldest first."""
_resent = threading.Event()
"""Set when this process sends itself a signal again that was caught before."""
_unwinding = threading.Event()
_lacks_threads = threading.Event()
_STOP: ContextVar[threading.Event | None] = ContextVar("quiver_stop", default=None)


def watch_signals() -> None:
    """Start to watch for SIGINT and SIGTERM."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _unwind)
    threading.Thread(target=_watch, args=(reader,), daemon=True, name="stop-watch").start()


def refused_thread() -> RuntimeError | None:
    """Return the error if this process cannot start a thread, else None.

    In that case OpenBLAS interrupts the process while it is imported. That signal is no request to
    stop and is not counted.
    """
    try:
        threading.Thread(target=int, daemon=True).start()
    except RuntimeError as error:
        _lacks_threads.set()
        return error
    return None


def leave_if_told() -> None:
    """End the process if a signal asked it to, once it has unwound.

    A normal exit of Python would take seconds, during which no thread watches.
    """
    if _signals and not _lacks_threads.is_set():
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + _signals[-1])


def _unwind(number: int, frame: FrameType | None) -> None:
    # While a flow runs, Prefect catches SIGTERM, and sends it to us again when the flow has ended.
    if frame is not None and frame.f_code.co_name == "capture_sigterm":
        _resent.set()
    if not _unwinding.is_set():  # Otherwise `_watch` decides.
        _unwinding.set()
        sys.exit(128 + number)


def _watch(reader: int) -> None:
    """Count the signals; end the process at the second one, or when its time is over."""
    poll = select.poll()
    poll.register(reader)
    first_at = 0.0
    while True:
        seconds = first_at + STOP_SECONDS - time.monotonic()
        if not poll.poll(max(0, 1000 * seconds) if _signals else None):
            _end(f"did not stop within {STOP_SECONDS:g} s")
        numbers = [n for n in os.read(reader, 4096) if n in (signal.SIGINT, signal.SIGTERM)]
        if not numbers:
            continue
        if not _signals:
            first_at = time.monotonic()
            _signals.append(numbers[0])
        elif time.monotonic() > first_at + TOGETHER_SECONDS:
            time.sleep(0.1)  # Time for `_unwind` to be called.
            if not _resent.is_set():
                _signals.append(numbers[-1])
                _end("got a second signal to stop")
            _resent.clear()


def _end(why: str) -> None:
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # A live bar hides the cursor.
    line = f"{cursor}quiver {why}: it ends at once; finished shards and versions are kept\n"
    os.write(sys.stderr.fileno(), line.encode())
    os._exit(128 + _signals[-1])


def end_with_the_parent() -> None:
    """Start to watch the worker in a daemon thread.

    It may have died already, while this process was importing. Then it no longer listens at the
    port that it gave this process for commands.
    """
    threading.Thread(
        target=_watch_worker, args=(os.getppid(),), daemon=True, name="worker-watch"
    ).start()


def _watch_worker(parent: int) -> None:
    environment = Path("/proc/self/environ").read_bytes()  # Prefect removes it from os.environ.
    port = re.search(rb"(?:^|\0)PREFECT__CONTROL_PORT=(\d+)", environment)
    try:
        if port:
            socket.create_connection(("127.0.0.1", int(port[1])), timeout=10).close()
        listens = True
    except OSError as error:
        listens = not isinstance(error, ConnectionRefusedError)
    while listens and os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


# -- work in a thread


class Ahead(Future[_T]):
    """The future result of work in another thread. Setting `stop` makes `is_stopped` true there."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()


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
        thread.join(subprocesses.GRACE_SECONDS + 3)
