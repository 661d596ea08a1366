"""Prefect's server: whether one answers, whether strangers can use it, and one of our own for a
laptop.

Whoever reaches Prefect's API can run what they like on every worker. So an API that answers without
credentials is accepted on loopback only: `PREFECT_SERVER_API_AUTH_STRING=user:password` closes the
server, `PREFECT_API_AUTH_STRING` opens it to a client.

    check_api()                                 # ConfigError, RemoteError, SecurityError
    with own_server(4200) as url: ...           # http://127.0.0.1:4200/api, until the block ends
"""

from __future__ import annotations

import ipaddress
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from quiver.schemas.errors import ConfigError, RemoteError, ResourceError, SecurityError, printable
from quiver.stages.reward.servers.config import is_loopback

LEASES = "prefect.server.concurrency.lease_storage.filesystem"
"""Where the server keeps who holds a concurrency slot. By default that is its memory: what is held
when it dies stays held."""
_CORS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
"""Prefect's default lets any page that the user's browser shows use a server on loopback."""
_START_SECONDS = 120
_START = "prefect server start"
_LISTEN = "0A"
log = logging.getLogger("quiver")


def check_api() -> str:
    """The API's URL.

    ConfigError: none is set, or it refuses our credentials; RemoteError: nobody answers;
    SecurityError: strangers could use it.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigError(
            "PREFECT_API_URL",
            "is not set: deployments live on a Prefect server, and the embedded one has neither "
            "workers nor schedules",
            next=f"{_START}, then export PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
    shown = printable(url)
    stranger = httpx.URL(url).copy_with(username=None, password=None)
    try:
        answer = httpx.post(
            f"{stranger}/work_pools/filter", json={"limit": 1}, follow_redirects=True, timeout=60
        )
    except httpx.HTTPError as error:
        raise RemoteError(
            f"Prefect API {shown}", f"does not answer: {printable(error)}", next=_START
        ) from None
    settings = _check_credentials(shown)
    if answer.status_code not in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        _refuse_open(url, settings)
    if settings.get("concurrency", {}).get("lease_storage", LEASES) != LEASES:
        log.warning(
            "this server forgets who holds a slot when it is killed; start it with %s",
            _lease_variable(),
        )
    return url


def _refuse_open(url: str, settings: dict[str, Any]) -> None:
    named = urlsplit(url)
    hosts = [named.hostname or "", settings.get("api", {}).get("host", "")]
    if is_loopback(
        hosts[0]
    ):  # a process of this machine, whose command may say another address than its settings
        hosts += listening(named.port or 80)
    exposed = next((each for each in hosts if each and not is_loopback(each)), None)
    if exposed:
        raise SecurityError(
            f"Prefect API {printable(url)}",
            f"listens on {printable(exposed)} and answers without credentials: whoever reaches it "
            "runs code on every worker",
            next=f"PREFECT_SERVER_API_AUTH_STRING=user:password {_START} --host "
            f"{printable(exposed)}, and "
            "PREFECT_API_AUTH_STRING=user:password for workers and this command; or --host "
            "127.0.0.1",
        )


def listening(port: int) -> list[str]:
    """The addresses of this machine on which somebody listens at `port`, as Linux tells them."""
    found = []
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            (address, _, number), state = line.split()[1].partition(":"), line.split()[3]
            if state == _LISTEN and int(number, 16) == port:
                raw = bytes.fromhex(address)  # words of four bytes, each in this machine's order
                ip = ipaddress.ip_address(
                    b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                )
                found.append(str(getattr(ip, "ipv4_mapped", None) or ip))
    return found


def _check_credentials(shown: str) -> dict[str, Any]:
    """The server's settings, where it gives them to us."""
    try:
        with get_client(sync_client=True) as client:
            client.read_work_pools(limit=1)
            with suppress(PrefectHTTPStatusError):  # somebody's proxy may keep them
                return client.request("GET", "/admin/settings").json().get("server", {})
            return {}
    except PrefectHTTPStatusError as error:
        raise ConfigError(
            f"Prefect API {shown}",
            f"answers {error.response.status_code} to our credentials",
            next="export PREFECT_API_AUTH_STRING=user:password, as the server has it in "
            "PREFECT_SERVER_API_AUTH_STRING",
        ) from None


def _lease_variable() -> str:
    return f"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE={LEASES}"


# -- a server of our own


@contextmanager
def own_server(port: int) -> Iterator[str]:
    """A real server on loopback, and this process as its client: until the block ends, or the
    process does, even by kill -9."""
    host = "127.0.0.1"
    with socket.socket() as probe:
        if probe.connect_ex((host, port)) == 0:
            raise ConfigError(
                f"port {port}",
                "is taken: maybe a Prefect server runs there already",
                next=f"export PREFECT_API_URL=http://{host}:{port}/api, or choose another --port",
            )
    url, name = f"http://{host}:{port}/api", Path(PREFECT_HOME.value()) / f"server-{port}.log"
    name.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        host,
        "--port",
        str(port),
    ]
    own = {"PREFECT_API_URL": url, _CORS: f"http://{host}:{port},http://localhost:{port}"}
    environment = {**os.environ, **own, **dict([_lease_variable().split("=")])}
    with name.open("wb") as told:
        server = subprocess.Popen(
            command, env=environment, stdout=told, stderr=told, start_new_session=True
        )
    try:
        _end_with_this_process(server.pid)
        _wait_for(server, url, name)
        os.environ["PREFECT_API_URL"] = url  # of what is started from here
        with temporary_settings({PREFECT_API_URL: url}):
            yield url
    finally:
        os.environ.pop("PREFECT_API_URL", None)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _end_with_this_process(group: int) -> None:
    """A shell waits on a pipe that only this process holds open, and ends `group` when that
    closes."""
    waiting, _ = os.pipe()
    command = ["sh", "-c", f"read _; kill -- -{group}; sleep 5; kill -9 -- -{group}"]
    subprocess.Popen(
        command,
        stdin=waiting,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(waiting)


def _wait_for(server: subprocess.Popen, url: str, log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        if server.poll() is not None or time.monotonic() > deadline:
            what = (
                "ended"
                if server.poll() is not None
                else f"did not answer within {_START_SECONDS} s"
            )
            raise ResourceError(
                "Prefect server",
                f"{what}; its last words are in {log_file}",
                next=f"tail {log_file}",
            )
        time.sleep(0.2)
