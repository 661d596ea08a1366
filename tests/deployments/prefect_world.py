"""A Prefect server and workers as real processes, in a folder of their own; any of them can be
killed and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from quiver.deployments.server import LEASES
from tests.flows.conftest import free_port, own_home
from tests.spent import watch
from tests.warm import REAL_PYTHON

T = TypeVar("T")
PATIENCE = 300


def wait_for(
    what: str, found: Callable[[], T | None], seconds: float = PATIENCE, pause: float = 0.5
) -> T:
    """What `found` returns when that is true, asked for again after each pause, since an answer of
    the server costs as much as a small test; an AssertionError that names `what` when it never is."""
    deadline = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(pause)
    return value


class World:
    """`folder/prefect` is Prefect's home; every process that belongs here bears its name in the
    environment."""

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        auth: str | None = None,
        database: str | None = None,
    ) -> None:
        self.folder, self.host, self.auth, self.port = folder, host, auth, free_port()
        self.database = database
        self.url = f"http://127.0.0.1:{self.port}/api"
        self.home = folder / "prefect"
        self.home.mkdir(parents=True, exist_ok=True)
        self.running: dict[str, subprocess.Popen] = {}
        self.env = {
            **own_home(folder),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
            "PREFECT_SERVER_DEPLOYMENTS_CONCURRENCY_SLOT_WAIT_SECONDS": "1",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
            # a poll writes: with two workers that ask once a second SQLite refuses one deployment
            # after another (prefect#23051)
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            "PREFECT_API_URL": self.url,
            **({"PREFECT_SERVER_DATABASE_CONNECTION_URL": database} if database else {}),
            **(
                {"PREFECT_SERVER_API_AUTH_STRING": auth, "PREFECT_API_AUTH_STRING": auth}
                if auth
                else {}
            ),
        }

    def start(self, name: str, *command: str, program: str | None = None) -> subprocess.Popen:
        """Start Python with `command` under a name; its words go to `folder/name.log`. `program` is
        what runs where that is not the interpreter of the tests."""
        with (self.folder / f"{name}.log").open("ab") as told:
            self.running[name] = subprocess.Popen(
                [sys.executable, *command],
                executable=program, cwd=self.folder, env=self.env, stdin=subprocess.DEVNULL, stdout=told, stderr=told, start_new_session=True,
            )  # fmt: skip
        return self.running[name]

    def start_server(self) -> None:
        where = ("--host", self.host, "--port", str(self.port))
        self.start("server", "-m", "prefect", "server", "start", *where)

        def healthy() -> bool:
            assert self.running["server"].poll() is None, (self.folder / "server.log").read_text()[
                -3000:
            ]
            with suppress(httpx.HTTPError):
                return httpx.get(f"{self.url}/health", timeout=5, verify=False).status_code == 200
            return False

        wait_for("the server", healthy)
        server = psutil.Process(self.running["server"].pid)
        for process in (server, *server.children()):
            watch(process.pid)

    def start_worker(self, pool: str, name: str) -> None:
        """A process worker, the parent of its flows, so no fork of a warm interpreter; the pool is
        made where there is none."""
        about = ("--pool", pool, "--name", name, "--type", "process")
        self.start(name, "-m", "prefect", "worker", "start", *about, program=REAL_PYTHON)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """The process alone, not what it started."""
        process = self.running.pop(name)
        process.send_signal(number)
        process.wait(30)

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for process_id in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)

    def processes(self, **variables: str) -> list[int]:
        """Ids of the processes of this world whose environment holds `variables` besides."""
        wanted = {
            f"{name}={value}".encode()
            for name, value in {"PREFECT_HOME": str(self.home), **variables}.items()
        }
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                alive = (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if alive and wanted <= set((process / "environ").read_bytes().split(b"\0")):
                    found.append(int(process.name))
        return found

    @contextmanager
    def client(self) -> Iterator[SyncPrefectClient]:
        """This process as a client of the server; inside, `deploy` and the like find it too."""
        auth = {PREFECT_API_AUTH_STRING: self.auth} if self.auth else {}
        with (
            temporary_settings({PREFECT_API_URL: self.url, **auth}),
            get_client(sync_client=True) as client,
        ):
            yield client


@contextmanager
def world(folder: Path, **options) -> Iterator[World]:
    made = World(folder, **options)
    try:
        made.start_server()
        yield made
    finally:
        made.stop()
