"""A flow's process whose worker dies is ended: asked by SIGTERM first, killed if it ignores that."""

import os
import socket
import subprocess
import sys
import time

import pytest

from tests.flows.conftest import wait_until

FLOW = """
import os, signal, sys, time
from pathlib import Path
from quiver.flows import stopping
stopping.POLL_SECONDS, stopping.GRACE_SECONDS = 0.05, 0.5
ends = sys.argv[1] == "listens"
signal.signal(signal.SIGTERM, lambda *_: (Path("asked").touch(), ends and sys.exit()))
stopping.end_with_the_parent()
Path("pid").write_text(str(os.getpid()))
while True:
    time.sleep(0.05)
"""
WORKER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("how", ["listens", "ignores it"])
def test_a_flow_does_not_outlive_its_worker(tmp_path, how):
    worker = subprocess.Popen([sys.executable, "-c", WORKER, FLOW, how], cwd=tmp_path)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text())
    time.sleep(0.3)
    assert not (tmp_path / "asked").exists(), "as long as the worker lives it is left alone"
    worker.kill()
    worker.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{pid.read_text()}/exe"))
    assert (tmp_path / "asked").exists()


@pytest.mark.parametrize("accepts", [True, False])
def test_nor_a_worker_that_died_before_it_looked(tmp_path, accepts):
    """The parent is alive here, as init is, which adopts an orphan; the port is what the worker
    listened at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        environment = {**os.environ, "PREFECT__CONTROL_PORT": str(server.getsockname()[1])}
        if not accepts:
            server.close()
        command = [sys.executable, "-c", FLOW, "listens"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment) as flow:
            if accepts:
                server.accept()[0].close()
                time.sleep(0.3)
                assert flow.poll() is None
                flow.kill()
            else:
                assert flow.wait(60) == 0 and (tmp_path / "asked").exists()
