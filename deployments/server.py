"""Check Prefect's server, or start one for a laptop. Look here for what `quiver deploy` refuses
before it registers anything.

A client of Prefect's API can run any code on every worker. So an API that answers without
credentials is accepted on loopback only. `PREFECT_SERVER_API_AUTH_STRING=user:password` closes the
server; `PREFECT_API_AUTH_STRING` opens it to a client.

    check_api()                                 # ConfigError, RemoteError, SecurityError
    with own_server(4200) as url: ...           # http://127.0.0.1:4200/api, until the block ends
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from quiver.flows.cli.embedded import alone_at_first
from quiver.flows.prefect_server import asking, without_login
from quiver.schemas.errors import ConfigError, ResourceError, SecurityError, printable
from quiver.stages.core.processes.subprocesses import Process
from quiver.stages.core.servers import is_loopback

LEASES = "prefect.server.concurrency.lease_storage.filesystem"
"""Storage of concurrency slots' holders on the server. By default it is memory, so a slot held
when the server dies stays held."""
_LEASE_STORAGE = "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE"
_CORS = "PREFECT_SERVER_CORS_ALLOWED_ORIGINS"
"""Origins that may call the server. Prefect's default lets any page in the user's browser use a
server on loopback."""
_START_SECONDS = 120
_START = "prefect server start"
log = logging.getLogger("quiver")


def check_api() -> str:
    """Return the API's URL after checking that the server is usable and not open to strangers.

    Raises:
        ConfigError: No URL is set, or the server refuses our credentials.
        RemoteError: The server does not answer.
        SecurityError: The server answers without credentials on an address other than loopback.
    """
    url = PREFECT_API_URL.value()
    if not url:
        raise ConfigError(
            "PREFECT_API_URL",
            "is not set: deployments live on a Prefect server, and the embedded one has neither "
            "workers nor schedules",
            next=f"{_START}, then export PREFECT_API_URL=http://127.0.0.1:4200/api",
        )
    refusals = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
    settings: dict[str, Any] = {}
    with asking(url):
        stranger = httpx.URL(url).copy_with(username=None, password=None)
        options = {"json": {"limit": 1}, "follow_redirects": True, "timeout": 60}
        with httpx.stream("POST", f"{stranger}/work_pools/filter", **options) as answer:
            pass  # only the status matters
        with get_client(sync_client=True) as client:
            try:
                client.read_work_pools(limit=1)
            except PrefectHTTPStatusError as error:
                if error.response.status_code not in refusals:
                    raise
                raise ConfigError(
                    f"Prefect API {without_login(url)}",
                    f"answers {error.response.status_code} to our credentials",
                    next="export PREFECT_API_AUTH_STRING=user:password, as the server has it in "
                    "PREFECT_SERVER_API_AUTH_STRING",
                ) from None
            with suppress(PrefectHTTPStatusError):  # a proxy may withhold them
                settings = client.request("GET", "/admin/settings").json().get("server", {})
    address = urlsplit(url)
    hosts = [address.hostname or "", settings.get("api", {}).get("host", "")]
    if is_loopback(hosts[0]):  # its command line may override the host in its settings
        hosts += listening(address.port or 80)
    for host in filter(None, hosts):
        if answer.status_code not in refusals and not is_loopback(host):
            raise SecurityError(
                f"Prefect API {without_login(url)}",
                f"listens on {printable(host)} and answers without credentials: anyone who reaches "
                "it can run code on every worker",
                next=f"PREFECT_SERVER_API_AUTH_STRING=user:password {_START} --host "
                f"{printable(host)}, and PREFECT_API_AUTH_STRING=user:password for workers and "
                "this command; or --host 127.0.0.1",
            )
    if settings.get("concurrency", {}).get("lease_storage", LEASES) != LEASES:
        log.warning(
            "this server forgets who holds a slot when it is killed; start it with %s",
            f"{_LEASE_STORAGE}={LEASES}",
        )
    return url


def listening(port: int) -> list[str]:
    """Return the addresses of this machine on which a process listens at `port`. Empty on systems
    that do not show other users' sockets."""
    addresses = []
    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                addresses.append(connection.laddr.ip)
    return addresses


# -- a server of our own


@contextmanager
def own_server(port: int) -> Iterator[str]:
    """Start a real server on loopback and make this process its client, until the block ends. The
    server also ends if this process dies, even by kill -9."""
    host = "127.0.0.1"
    url = f"http://{host}:{port}/api"
    with socket.socket() as probe:
        if probe.connect_ex((host, port)) == 0:
            raise ConfigError(
                f"port {port}",
                "is in use, perhaps by a Prefect server",
                next=f"export PREFECT_API_URL={url}, or choose another --port",
            )
    log_file = Path(PREFECT_HOME.value()) / f"server-{port}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PREFECT_API_URL": url,
        _CORS: f"http://{host}:{port},http://localhost:{port}",
        _LEASE_STORAGE: LEASES,
    }
    with ExitStack() as stack:
        with alone_at_first(log_file.parent), log_file.open("wb") as output:
            server = Process(
                [sys.executable, "-m", *_START.split(), "--host", host, "--port", str(port)],
                orphan_grace=5,
                env=environment,
                stdout=output,
                stderr=output,
            )
            stack.enter_context(server)
            _wait_for(server, url, log_file)
        os.environ["PREFECT_API_URL"] = url  # for processes that this one starts
        stack.callback(os.environ.pop, "PREFECT_API_URL", None)
        with temporary_settings({PREFECT_API_URL: url}):
            yield url


def _wait_for(server: subprocess.Popen, url: str, log_file: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    with httpx.Client(timeout=5) as client:  # one, since each reads all certificates
        while server.poll() is None and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == httpx.codes.OK:
                    return
            time.sleep(0.2)
    how = "ended" if server.poll() is not None else f"did not answer within {_START_SECONDS} s"
    raise ResourceError(
        "Prefect server",
        f"{how}; its last output is in {log_file}",
        next=f"tail {log_file}",
    )
