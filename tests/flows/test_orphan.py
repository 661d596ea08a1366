"""A flow's process whose worker dies is ended: asked by SIGTERM first, and killed where it does not
listen."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.flows.conftest import wait_until

FLOW = """
import os, signal, sys, time
from pathlib import Path
from quiver.flows import stopping
stopping.POLL_SECONDS, stopping.GRACE_SECONDS = 0.05, 0.5
signal.signal(signal.SIGTERM, lambda *_: (Path("asked").touch(), sys.argv[1] == "listens" and sys.exit()))
stopping.end_with_the_parent()
Path("pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""
WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.parametrize("how", ["listens", "ignores it"])
def test_nobody_outlives_his_worker(tmp_path, how):
    worker = subprocess.Popen([sys.executable, "-c", WORKER, FLOW, how], cwd=tmp_path)
    written = tmp_path / "pid"
    wait_until(lambda: written.exists() and written.read_text())
    pid = written.read_text()
    time.sleep(0.3)
    assert alive(pid) and not (tmp_path / "asked").exists(), (
        "as long as the worker lives it is left alone"
    )
    worker.kill()
    worker.wait()
    wait_until(lambda: not alive(pid))
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("listens", [True, False])
def test_nor_one_that_died_before_he_looked(tmp_path, listens):
    """The parent is alive here, and stands for init, which adopts an orphan; the port is what the
    worker listened at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        if not listens:
            server.close()
        environment = {**os.environ, "PREFECT__CONTROL_PORT": port}
        flow = subprocess.Popen(
            [sys.executable, "-c", FLOW, "listens"], cwd=tmp_path, env=environment
        )
        try:
            if listens:
                server.accept()[0].close()
                time.sleep(0.3)
                assert flow.poll() is None
            else:
                assert flow.wait(60) == 0 and (tmp_path / "asked").exists()
        finally:
            flow.kill()
            flow.wait()
