"""A flow run does not outlive the worker that started it: nobody could cancel it any more, and its place is taken over.

Prefect's workers leave their flow processes running when they are killed. A thread asks every second whether the parent still is
the one that it began with; when not, the flow gets SIGTERM, as on a cancel, and so ends its stage; if it can not end (it tells the
server so first, which may be gone as well), SIGKILL follows, and the stage's process sees its lifeline close.
"""

from __future__ import annotations

import os
import signal
import threading
import time

POLL_SECONDS = 1
GRACE_SECONDS = 15


def end_with_the_parent() -> None:
    """Watch from now on; the thread is the process's own and ends with it."""
    threading.Thread(target=_watch, args=(os.getppid(),), daemon=True, name="worker-watch").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
