"""The Prefect server that PREFECT_API_URL names: does it answer, runs of dead shells, events.

Look here if a command hangs at the server, if a flow run of a dead shell stays "Running", or if a
deployment does not start after a command.

A flow that a shell runs carries a tag with its process and host. The next command on the same host
finds the runs of dead processes, also after a restart of the host, and marks them as crashed.

A flow hands its events (new versions, moved tags) to a thread of Prefect's, which may retry for
minutes and does not report failure. A command outside a flow ends at once, so it posts the same
events itself. Without PREFECT_API_URL nothing is posted, and Prefect is not imported.

    without_login("http://me:password@host/api")    # http://…@host/api
    require_answer(url)                             # RemoteError after SECONDS
    with tags(shell_tag()):
        flow()
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import astuple
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from quiver.schemas.errors import ConfigError, QuiverError, RemoteError, printable
from quiver.schemas.manifest import digest
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.store.leases import Owner
from quiver.stages.core.store.tags import Entry

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun

SECONDS = 30.0
"""Time that a server has to answer. A healthy one took more than 8 s on a host with busy cores."""
MOST_BYTES = 64 * 1024
"""Most bytes of a health answer; a server that sends more is not Prefect's."""
RUNS_AT_ONCE = 200
"""The number of runs that a server lists in one answer."""
_LOGIN = re.compile(r"^(.*?//)?.*@", re.DOTALL)
_LOGIN_IN_TEXT = re.compile(r"//\S*@")
_PREFIX = "shell:"
_UNFINISHED = {"state": {"type": {"any_": ["RUNNING", "PENDING"]}, "name": None}}
_RESPITE_SECONDS = 600.0
"""Time without further events after one that the server did not take."""
_Answer = TypeVar("_Answer")
_failed_at = -math.inf
log = logging.getLogger("quiver")


def without_login(shown: str | Exception) -> str:
    """Return a URL, or an error's text about one, without user and password.

    In a URL everything before the last @ is removed, since a password may hold any character.
    """
    if isinstance(shown, Exception):
        return printable(_LOGIN_IN_TEXT.sub("//…@", str(shown)))
    return printable(_LOGIN.sub(r"\1…@", shown))


def within_seconds(ask: Callable[[], _Answer]) -> _Answer:
    """Return what `ask` returns, or raise its error; TimeoutError after SECONDS.

    It runs in a thread, since no timeout of httpx covers a whole answer, and Prefect's client
    retries for as long as a busy server asks it to. The thread dies with this process.
    """
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True, name="prefect-server").start()
    return answer.result(SECONDS)


def require_answer(url: str) -> None:
    """Raise RemoteError unless the server at `url` answers within SECONDS, with at most MOST_BYTES.

    Prefect's own client waits a minute per try, for ever if a server sends single bytes, and reads
    an answer of any length. Other errors are left to the next request, which meets and reports
    them.
    """
    import httpx

    def is_short() -> bool:
        num_bytes = 0
        with (
            suppress(Exception),
            httpx.stream("GET", f"{url}/health", timeout=None) as response,
        ):
            for chunk in response.iter_bytes():
                num_bytes += len(chunk)
                if num_bytes > MOST_BYTES:
                    return False
        return True

    name = f"Prefect API {without_login(url)}"
    try:
        if not within_seconds(is_short):
            raise RemoteError(
                name,
                f"answers with more than {MOST_BYTES:,} bytes to a health check, so it is not a "
                "Prefect server",
                next="correct PREFECT_API_URL, or unset it, and run again",
            )
    except TimeoutError:
        raise RemoteError(
            name,
            f"does not answer within {SECONDS:g} s",
            next="prefect server start, or correct PREFECT_API_URL, and run again",
        ) from None


# -- flow runs of commands that died


def shell_tag() -> str:
    """Return the tag of this process's flow runs:
    `shell:BOOT_ID:PID_NAMESPACE:PID:START_TIME:HOST`."""
    return _PREFIX + ":".join(map(str, (*astuple(Owner.this_process()), host_id())))


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Ask the server at `url` inside, with our errors for an answer that is not Prefect's.

    Raises:
        RemoteError: The server does not answer, or not as Prefect does.
        ConfigError: `url` is no address.
    """
    import httpx

    if url:
        require_answer(url)
    try:
        yield
    except QuiverError:  # Some are ValueErrors, too.
        raise
    except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        # The error may quote part of a password.
        how = "is each special character of its password percent-encoded?" if "@" in url else error
        raise ConfigError(
            f"Prefect API {without_login(url)}",
            f"is not a server's address: {printable(how)}",
            next="export PREFECT_API_URL=http://HOST:4200/api, or unset it, and run again",
        ) from None
    except (httpx.HTTPError, ValueError) as error:  # ValueError: its answer is not Prefect's
        raise RemoteError(
            f"Prefect API {without_login(url)}".strip(),
            f"does not answer like a Prefect server: {type(error).__name__}: "
            f"{without_login(error)}",
            next="prefect server start, or correct or unset PREFECT_API_URL, and run again",
        ) from error


def crash_abandoned() -> int:
    """Mark flow runs of dead processes on this host, and their task runs, as crashed on the server.

    Returns the number of flow runs. Raises RemoteError if no server answers, and ConfigError if its
    address is invalid.
    """
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
    from prefect.settings import PREFECT_API_URL
    from prefect.states import Crashed

    message = "its process is gone; finished shards and versions are kept"
    with asking(PREFECT_API_URL.value() or ""), get_client(sync_client=True) as client:
        runs: list[FlowRun] = []
        while page := client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate(_UNFINISHED),
            limit=RUNS_AT_ONCE,
            offset=len(runs),
        ):
            runs += page
        runs = [run for run in runs if any(map(_is_dead, run.tags))]
        for run in runs:
            # One page is enough: a flow runs few tasks at once. The flow comes last, since only
            # unfinished flows are looked for.
            for task in client.read_task_runs(
                flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [run.id]}}),
                task_run_filter=TaskRunFilter.model_validate(_UNFINISHED),
            ):
                client.set_task_run_state(task.id, Crashed(message=message), force=True)
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    return len(runs)


def _is_dead(tag: str) -> bool:
    with suppress(ValueError, TypeError):  # Another tag, or one in another format.
        prefix, boot_id, namespace, pid, start_time, host = tag.split(":")
        owner = Owner(boot_id, int(namespace), int(pid), int(start_time))
        is_before_restart = boot_id != Owner.this_process().boot_id and host == host_id() != ""
        return f"{prefix}:" == _PREFIX and (owner.is_dead or is_before_restart)
    return False


def host_id() -> str:
    """Return an id of this host that survives restarts, or "" if its name is not specific.

    It combines the machine-id, which containers of one image may share, and the host name.
    """
    machine_id, name = "", socket.gethostname()
    if name.partition(".")[0] in ("", "localhost"):
        return ""
    with suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text().strip()
    return digest([machine_id, name])[:16]


# -- events of commands outside a flow


def tell_version(call: Call, outcome: Outcome) -> None:
    """Post an event for each version that the stage wrote; none if it existed already. Never
    raises."""
    if not outcome.cached:
        _tell(outcome.ref, lambda events: events.version_events(call, outcome))


def tell_moved(name: str, entry: Entry) -> None:
    """Post the event that the tag `name` = run/kind@tag moved. Never raises."""
    _tell(name, lambda events: [events.moved_event(name, entry)])


def _tell(name: str, make: Callable[[ModuleType], list[dict[str, Any]]]) -> None:
    """Post the events that `make` builds with the module `look.pages.events`.

    Logs a warning that names `name` if the server has not taken them in time.
    """
    global _failed_at  # noqa: PLW0603
    if not os.environ.get("PREFECT_API_URL"):
        return
    try:
        if time.monotonic() < _failed_at + _RESPITE_SECONDS:
            raise TimeoutError("the event before it was not accepted either")
        from prefect.client.orchestration import get_client
        from prefect.events import Event

        from .look.pages import events

        body = [Event(**event).model_dump(mode="json") for event in make(events)]

        def post() -> None:
            with get_client(sync_client=True) as client:
                client.request("POST", "/events", json=body)

        within_seconds(post)
    except Exception as error:
        # Any error: the command's work is done, and its answer must not change.
        _failed_at = time.monotonic()
        log.warning(
            "%s: its event did not reach Prefect's server, so it starts no deployment (%s)",
            name,
            printable(error) or f"no answer within {SECONDS:g} s",
        )
