"""Flow runs of commands that died, which Prefect would show as running for ever.

A flow that a shell runs carries a tag with its process and host. The next command on the same host
finds the runs of dead processes, also after a restart of the host, and marks them as crashed on the
server.

    with tags(shell_tag()):
        flow()
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from quiver.schemas.errors import RemoteError
from quiver.schemas.manifest import digest
from quiver.stages.common.store.leases import Owner

from .server_url import no_address, require_answer, without_login

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_PREFIX = "shell:"
_UNFINISHED = {"state": {"type": {"any_": ["RUNNING", "PENDING"]}, "name": None}}
RUNS_AT_ONCE = 200
"""The number of runs that a server lists in one answer."""


def shell_tag() -> str:
    """Return the tag of this process's flow runs:
    `shell:BOOT_ID:PID_NAMESPACE:PID:START_TIME:HOST`."""
    return _PREFIX + ":".join(map(str, (*astuple(Owner.this_process()), _host())))


def crash_abandoned() -> int:
    """Mark flow runs of dead processes on this host, and their task runs, as crashed on the server.

    Returns the number of flow runs. Raises RemoteError if no server answers, and ConfigError if its
    address is invalid.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.settings import PREFECT_API_URL
    from prefect.states import Crashed

    message = "its process is gone; what it finished is kept"
    url = PREFECT_API_URL.value()
    if url:
        require_answer(url)
    name = f"Prefect API {without_login(url or '')}".strip()
    try:
        with get_client(sync_client=True) as client:
            runs = abandoned_runs(client)
            for run in runs:
                # One page is enough: a flow runs few tasks at once. The flow comes last, since only
                # unfinished flows are looked for.
                for task in client.read_task_runs(
                    flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
                    task_run_filter=TaskRunFilter.model_validate(_UNFINISHED),
                ):
                    client.set_task_run_state(task.id, Crashed(message=message), force=True)
                client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise no_address(url or "", error) from None  # it may hold a password
    except (httpx.HTTPError, ValueError) as error:  # ValueError: its answer is not Prefect's
        raise RemoteError(
            name,
            f"does not answer as Prefect does: {type(error).__name__}: {without_login(error)}",
            next="prefect server start, or unset PREFECT_API_URL, and run again",
        ) from error
    return len(runs)


def abandoned_runs(client: SyncPrefectClient) -> list[FlowRun]:
    """Return the server's unfinished runs whose process on this host is dead."""
    from prefect.client.schemas.filters import FlowRunFilter

    filters = FlowRunFilter.model_validate(_UNFINISHED)
    runs: list[FlowRun] = []
    while page := client.read_flow_runs(
        flow_run_filter=filters, limit=RUNS_AT_ONCE, offset=len(runs)
    ):
        runs += page
    return [
        run for run in runs if any(_is_dead(tag) for tag in run.tags if tag.startswith(_PREFIX))
    ]


def _is_dead(tag: str) -> bool:
    with suppress(ValueError, TypeError):  # A tag in another format.
        boot_id, namespace, pid, start_time, host = tag.removeprefix(_PREFIX).split(":")
        owner = Owner(boot_id, int(namespace), int(pid), int(start_time))
        is_before_restart = boot_id != Owner.this_process().boot_id and host == _host() != ""
        return owner.is_dead or is_before_restart
    return False


def _host() -> str:
    """Return an id of this host that survives restarts, or "" if its name is not specific.

    It combines the machine-id, which containers of one image may share, and the host name.
    """
    machine_id, name = "", socket.gethostname()
    if name.partition(".")[0] in ("", "localhost"):
        return ""
    with suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text().strip()
    return digest([machine_id, name])[:16]
