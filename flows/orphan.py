"""A flow run does not outlive the worker that started it: nobody could cancel it any more, and its
place is taken over.

Prefect's workers leave their flow processes running when they are killed. A thread asks every
second whether the parent still is the first one; when not, the flow gets SIGTERM, as on a cancel,
and so ends its stage; if it cannot end (it tells the server so first, which may be gone as well),
SIGKILL follows, and the stage's keeper sees its lifeline close. A worker that died before the
thread began, while this process was still importing, no longer listens at the port that it gave
this process for commands.
"""

from __future__ import annotations

import os
import re
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
    if _worker_listens():
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _worker_listens() -> bool:
    """Whether the worker listens at the port that it gave this process; true where it gave none."""
    environment = Path("/proc/self/environ").read_bytes()  # Prefect takes it out of os.environ
    port = re.search(rb"(?:^|\0)PREFECT__CONTROL_PORT=(\d+)", environment)
    try:
        if port:
            socket.create_connection(("127.0.0.1", int(port[1])), timeout=10).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True
