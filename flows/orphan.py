"""The end of a flow run together with the worker that started it.

Without this, nothing could cancel the run any more, while another run takes its place. Prefect's
workers leave their flow processes running when they are killed. A thread checks every second if the
parent is still the first one. If not, the flow gets SIGTERM, as on a cancel, and ends its stage.
The flow may hang there, since it first informs the server, which may be gone too. Then SIGKILL
follows, and the stage's keeper sees its lifeline close.

A worker may also die before the thread starts, while this process is importing. It then no longer
listens at the port that it gave this process for commands.
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
    """Start to watch the worker in a daemon thread."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="worker-watch").start()


def _watch(parent: int) -> None:
    if _worker_listens():
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _worker_listens() -> bool:
    """True if the worker listens at the port that it gave this process, or gave none."""
    environment = Path("/proc/self/environ").read_bytes()  # Prefect removes it from os.environ.
    port = re.search(rb"(?:^|\0)PREFECT__CONTROL_PORT=(\d+)", environment)
    try:
        if port:
            socket.create_connection(("127.0.0.1", int(port[1])), timeout=10).close()
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True
