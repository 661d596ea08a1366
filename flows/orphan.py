"""A flow run does not outlive the worker that started it: nobody could cancel it any more, and its
place is taken over.

Prefect's workers leave their flow processes running when they are killed. A thread asks every
second whether the parent still is the one that it began with; when not, the flow gets SIGTERM, as
on a cancel, and so ends its stage; if it can not end (it tells the server so first, which may be
gone as well), SIGKILL follows, and the stage's process sees its lifeline close. Whoever died before
the thread began, while this process was still importing, no longer listens at the port that he gave
it for commands.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

POLL_SECONDS = 1
GRACE_SECONDS = 15


def end_with_the_parent() -> None:
    """Watch from now on; the thread is the process's own and ends with it."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="worker-watch").start()


def _watch(parent: int) -> None:
    if _is_there():
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_there() -> bool:
    """Whether the worker listens where it said when it started this process; true where it said
    nothing."""
    given = (
        Path("/proc/self/environ").read_bytes().split(b"\0")
    )  # Prefect takes it out of os.environ
    port = next(
        (
            int(entry.partition(b"=")[2])
            for entry in given
            if entry.startswith(b"PREFECT__CONTROL_PORT=")
        ),
        None,
    )
    if port is None:
        return True
    try:
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True
