"""One stage on the workers of a Prefect work pool: start runs of deployment `stage/POOL`, wait for
one of them, end the others.

With several workers each run is the same call; they share its shards, and the stage is done when
any of them returns. A run that fails does not fail the stage as long as others go on; when none
does, its error is raised here as it was raised there. The server may be gone for minutes meanwhile.
A run that nobody takes up is told, and given up when no worker is there at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError

from quiver.schemas.errors import (
    ConfigError,
    LineageError,
    QuiverError,
    RemoteError,
    ResourceError,
    printable,
)
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.common.runtime.subprocesses import Stopped
from quiver.stages.common.store import Store

from .placement import GivenUp, Place, require_server
from .stage import StageCall, told

POLL_SECONDS = 1.0
_SERVER_GONE_SECONDS = 600
_OVERTIME_SECONDS = 120
_STORE_LAG_SECONDS = 60
_KEPT = "finished shards and all versions are kept."
_starting = (
    threading.Lock()
)  # Prefect numbers the runs that a flow starts, and does not expect two threads
log = logging.getLogger("quiver")


def run_in_pool(
    where: Place,
    call: Call,
    label: str,
    tags: tuple[str, ...] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """The outcome of `call`, done by workers of `where.pool`. Whatever ends this call ends the runs
    that it started."""
    require_server(f"placement.{call.stage} {where.pool}")
    started = time.monotonic()
    with get_client(sync_client=True) as client, _told_as_ours(where.pool):
        online = _online(client, where.pool)
        count = (where.workers or max(1, len(online))) if call.share else 1
        if not online:
            log.warning(
                "%s: pool %s has no worker online; start one: %s",
                label,
                where.pool,
                _start_one(where.pool),
            )
        log.info("%s: %d run%s in pool %s", label, count, "s" if count > 1 else "", where.pool)
        runs: list[FlowRun] = []
        try:
            for number in range(1, count + 1):
                runs.append(
                    _start(
                        where, call, label if count == 1 else f"{label} ({number} of {count})", tags
                    )
                )
            ref = _wait(client, where, call, label, runs, stopped)
        finally:
            _end(client, runs)
    manifest = _visible(call, ref)
    return Outcome(
        ref, False, manifest.rows, round(time.monotonic() - started, 3), manifest.metrics
    )


def _start(where: Place, call: Call, label: str, tags: tuple[str, ...]) -> FlowRun:
    parameters = {"call": StageCall.of(call, where, label).model_dump(mode="json")}
    name = f"stage/{where.pool}"
    try:
        with _starting:
            return run_deployment(
                name,
                parameters=parameters,
                flow_run_name=label,
                tags=list(tags),
                timeout=0,
                idempotency_key=str(uuid4()),
            )
    except ObjectNotFound:
        what = f"the server has no deployment {name}"
        raise ConfigError(
            f"placement.{call.stage} {where.pool}",
            what,
            next=f"quiver deploy RECIPE --pool {where.pool}",
        ) from None


def _wait(
    client: SyncPrefectClient,
    where: Place,
    call: Call,
    label: str,
    runs: list[FlowRun],
    stopped: Callable[[], bool],
) -> str:
    """The reference that one of `runs` told. Puts into `runs` what the server says of them."""
    asked, began, failures = time.monotonic(), None, {}
    taken: dict = {}  # since when a worker has a run that it has not begun
    while True:
        runs[:] = _read(client, runs)
        for run in runs:
            if run.state.is_final() and run.id not in failures:
                answer = told(run.state.message) or {}
                if run.state.is_completed() and "ref" in answer:
                    return answer["ref"]
                failures[run.id] = _failure(call, run, answer.get("error"))
                log.warning("%s: %s", run.name, failures[run.id].message)
            elif not run.state.is_pending():
                taken.pop(run.id, None)
            elif (
                time.monotonic() > taken.setdefault(run.id, time.monotonic()) + where.wait_seconds
                and run.id not in failures
            ):
                what = (
                    f"a worker took {run.name!r} up and did not begin it within "
                    f"{where.wait_seconds:g} s"
                )
                failures[run.id] = ResourceError(
                    f"stage {call.stage}", what, state=_KEPT, next=f"prefect flow-run logs {run.id}"
                )
        if not any(run.state.is_running() for run in runs):
            asked, began = (time.monotonic() if began else asked), None
        elif began is None:
            began = time.monotonic()
        if len(failures) == len(runs):
            raise max(
                failures.values(), key=lambda error: not isinstance(error, ResourceError)
            )  # a crash says least
        if began is None and time.monotonic() > asked + where.wait_seconds:
            _require_somebody(client, where, label)
            asked = time.monotonic()
        if (
            began
            and where.timeout_seconds
            and time.monotonic() > began + where.timeout_seconds + _OVERTIME_SECONDS
        ):
            what = (
                f"nothing heard of its end {_OVERTIME_SECONDS} s after its limit of "
                f"{where.timeout_seconds:g} s"
            )
            raise ResourceError(
                f"stage {call.stage}",
                what,
                state=_KEPT,
                next="look after the pool's workers, then run again",
            )
        if stopped():
            raise Stopped(label)
        time.sleep(POLL_SECONDS)


def _read(client: SyncPrefectClient, runs: list[FlowRun]) -> list[FlowRun]:
    """`runs` as the server has them now; a server that is gone is waited for, one that lost them
    has lost them."""
    since = time.monotonic()
    while True:
        try:
            found = client.read_flow_runs(
                flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in runs]))
            )
        except (httpx.TransportError, PrefectHTTPStatusError) as error:
            refused = isinstance(error, PrefectHTTPStatusError) and error.response.status_code < 500
            if refused or time.monotonic() > since + _SERVER_GONE_SECONDS:
                raise
            log.warning("Prefect's server does not answer (%s); trying again", type(error).__name__)
            time.sleep(5)
            continue
        by_id, lost = (
            {run.id: run for run in found},
            State(type=StateType.CRASHED, message="the server does not know it"),
        )
        return [by_id.get(run.id) or run.model_copy(update={"state": lost}) for run in runs]


def _failure(call: Call, run: FlowRun, error: QuiverError | None) -> QuiverError:
    """Why a run that ended did not do the stage."""
    if error is not None:
        return error
    name, logs = f"stage {call.stage}", f"prefect flow-run logs {run.id}"
    if run.state.type == StateType.CANCELLED:
        return GivenUp(
            name,
            f"its flow run {run.name!r} was cancelled",
            state=_KEPT,
            next="run again; it goes on from there",
        )
    what = (
        f"its flow run {run.name!r} ended as {run.state.name}: "
        f"{printable(run.state.message or 'no message')}"
    )
    return ResourceError(name, what, state=_KEPT, next=logs)


def _require_somebody(client: SyncPrefectClient, where: Place, label: str) -> None:
    """GivenUp when no worker of the pool is online, or the pool is paused; else a line that says
    what is waited for."""
    paused, online = client.read_work_pool(where.pool).is_paused, _online(client, where.pool)
    if online and not paused:
        log.warning(
            "%s waits for a free worker of pool %s: %s", label, where.pool, ", ".join(online)
        )
        return
    why = "it is paused" if paused else "none is online"
    command = f"prefect work-pool resume {where.pool}" if paused else _start_one(where.pool)
    what = (
        f"no worker took up {label!r} within {where.wait_seconds:g} s (placement.wait_seconds): "
        f"{why}"
    )
    raise GivenUp(f"pool {where.pool}", what, state=_KEPT, next=command)


def _online(client: SyncPrefectClient, pool: str) -> list[str]:
    try:
        found = client.read_workers_for_work_pool(pool)
    except (ObjectNotFound, PrefectHTTPStatusError) as error:
        if isinstance(error, PrefectHTTPStatusError) and error.response.status_code != 404:
            raise
        what = "the server has no such work pool"
        raise ConfigError(
            f"pool {pool}", what, next=f"quiver deploy RECIPE --pool {pool}"
        ) from None
    return [worker.name for worker in found if worker.status.value == "ONLINE"]


def _start_one(pool: str) -> str:
    return f"prefect worker start --pool {pool}"


def _end(client: SyncPrefectClient, runs: list[FlowRun]) -> None:
    """Cancel what is not finished: a worker ends its process, and the stage below it; what waits is
    not begun."""
    for run in runs:
        if run.state is None or not run.state.is_final():
            try:
                client.set_flow_run_state(run.id, State(type=StateType.CANCELLING))
            except Exception as error:  # must not hide what ended the stage
                log.warning("%s could not be cancelled: %s", run.name, printable(error))


def _visible(call: Call, ref: str):
    """The manifest of `ref`, as soon as this host sees what another one wrote. LineageError when it
    does not."""
    store, since = Store(call.store), time.monotonic()
    while True:
        try:
            return store.open(ref).manifest
        except LineageError:
            if time.monotonic() > since + _STORE_LAG_SECONDS:
                raise
            time.sleep(0.5)


@contextmanager
def _told_as_ours(pool: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        what = f"Prefect's server failed: {type(error).__name__}: {printable(error)}"
        raise RemoteError(
            f"pool {pool}", what, state=_KEPT, next="prefect server start, then run again"
        ) from error
