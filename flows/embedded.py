"""Prefect's embedded server, for a run without a server of its own: it ends with the run, even when that is killed by kill -9.

Prefect stops it at a normal exit only. A shell that waits on a pipe to this process stops it in every other case.
"""

from __future__ import annotations

import os
import subprocess


def guard_embedded_server() -> None:
    """Start the embedded server and its guard; nothing where PREFECT_API_URL names a server."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import PREFECT_API_URL

    if PREFECT_API_URL.value():
        return
    server = SubprocessASGIServer()  # one a process: the flow's client takes this very server
    server.start()
    waiting, _ = os.pipe()  # the other end stays open in this process alone, until its end, however that comes
    command = ["sh", "-c", f"read _; kill {server.server_process.pid}"]
    subprocess.Popen(command, stdin=waiting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    os.close(waiting)
