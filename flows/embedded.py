"""Prefect's embedded server, for a run without a server of its own: it ends with the run, even when
that is killed by kill -9.

Prefect stops it at a normal exit only. A shell that waits on a pipe to this process stops it in
every other case. Ctrl-C in a terminal, and `timeout`, signal every process of the flow's group: the
server stands outside it, since the flow, as it ends, still has to tell the server so and would wait
for a dead one for more than a minute.
"""

from __future__ import annotations

import os
import subprocess
from functools import partial


def guard_embedded_server() -> None:
    """Start the embedded server and its guard; nothing where PREFECT_API_URL names a server."""
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return
    from prefect.server.api.server import (
        SubprocessASGIServer,
    )  # the whole server: half of a short run's imports

    server = SubprocessASGIServer()  # one a process: the flow's client takes this very server
    popen = subprocess.Popen
    subprocess.Popen = partial(popen, start_new_session=True)  # Prefect has no option for it
    try:
        server.start()
    finally:
        subprocess.Popen = popen
    waiting, _ = (
        os.pipe()
    )  # the other end stays open in this process alone, until its end, however that comes
    command = ["sh", "-c", f"read _; kill {server.server_process.pid}"]
    subprocess.Popen(
        command,
        stdin=waiting,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(waiting)
