"""Processes with a real vLLM: a server on a free port, or checks of a module."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

QUICK = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmProcess:
    """A server of the model in `folder`. It is ready after `wait`."""

    def __init__(self, folder: Path, log: Path, *arguments: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(port), *arguments],
                stdout=out,
                stderr=out,
                env=os.environ | QUICK,
                start_new_session=True,
            )

    def wait(self) -> None:
        deadline = time.monotonic() + 300
        while not self._is_ready():
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.log.read_text()[-3000:]
            )
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def checked(module: str, *arguments: object, **environment: str) -> Any:
    """Run `python -m module arguments` and return the JSON on its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
