"""Prefect's embedded server, for a run without a server of its own: it ends with the run, even when
that is killed by kill -9.

Prefect stops it at a normal exit only. Ctrl-C in a terminal, and `timeout`, signal every process of
the flow's group: the server stands outside it, since the flow, as it ends, still has to tell the
server so and would wait for a dead one for more than a minute.
"""

from __future__ import annotations

import subprocess
from functools import partial

from quiver.stages.common.runtime.subprocesses import Process

_GRACE_SECONDS = 5


def guard_embedded_server() -> None:
    """Start the embedded server so; nothing where PREFECT_API_URL names a server."""
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return
    # the whole server: half of a short run's imports
    from prefect.server.api.server import SubprocessASGIServer

    popen = subprocess.Popen
    subprocess.Popen = partial(Process, orphan_grace=_GRACE_SECONDS)  # Prefect has no option for it
    try:
        SubprocessASGIServer().start()  # one a process: the flow's client takes this very server
    finally:
        subprocess.Popen = popen
