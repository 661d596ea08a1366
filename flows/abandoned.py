"""Flow runs of shells that died: Prefect would show them as running for ever.

A flow that a shell runs bears a tag that names its process and its host. The next command on the
same host finds the runs of processes that are gone, with the host's last start if need be, and says
so to the server.

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
"""As many as a server lists in one answer."""


def shell_tag() -> str:
    """The tag of this process's flow runs: `shell:BOOT_ID:PID_NAMESPACE:PID:START_TIME:HOST`."""
    return _PREFIX + ":".join(map(str, (*astuple(Owner.this_process()), _host())))


def crash_abandoned() -> int:
    """Tell the server of the runs whose process on this host is gone, and of their task runs, which
    it would show as running too: how many flow runs there were.
    RemoteError where there is no server; ConfigError where its address is none."""
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
                # one page: few tasks of a flow are under way; the flow last, since it is looked for
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
    """The unfinished runs that the server knows of whose process on this host is gone."""
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
    with suppress(ValueError, TypeError):  # somebody else's tag
        boot_id, namespace, pid, start_time, host = tag.removeprefix(_PREFIX).split(":")
        owner = Owner(boot_id, int(namespace), int(pid), int(start_time))
        is_before_restart = boot_id != Owner.this_process().boot_id and host == _host() != ""
        return owner.is_dead or is_before_restart
    return False


def _host() -> str:
    """What tells this host from others, after a restart too: its machine-id, which containers of
    one image may share, and its name. Empty where the name tells nothing."""
    machine_id, name = "", socket.gethostname()
    if name.partition(".")[0] in ("", "localhost"):
        return ""
    with suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text().strip()
    return digest([machine_id, name])[:16]
