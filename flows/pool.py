"""One stage on the workers of a Prefect work pool.

It starts runs of the deployment `stage/POOL`, waits for one of them, and ends the others. Look here
if a stage in a pool waits, fails or does not end.

With several workers, each flow run gets the same call. They share its shards, and the stage is done
when any of them returns. A failed run does not fail the stage while others are running; if all
fail, the error is raised here. Prefect's server may be unreachable for minutes meanwhile. A run
that no worker takes is logged, and given up if the pool has no worker online.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID, uuid4

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
    from_dict,
    printable,
)
from quiver.stages.core.processes.subprocesses import Stopped
from quiver.stages.core.run.call import Call, Outcome
from quiver.stages.core.run.stage import load_stage
from quiver.stages.core.store import Store

from .placement import GivenUp, require_server
from .prefect_server import without_login
from .stopping import is_stopped

POLL_SECONDS = 1.0
_SERVER_GONE_SECONDS = 600
_OVERTIME_SECONDS = 120
_STORE_LAG_SECONDS = 60
_STATE = "finished shards and all versions are kept."
# Prefect numbers the runs that a flow starts, which is not safe with two threads.
_starting = threading.Lock()
log = logging.getLogger("quiver")


def run_in_pool(call: Call, tags: Sequence[str] = ()) -> Outcome:
    """Run `call` on workers of its pool and return its outcome.

    Any exception here also ends the runs that were started.

    Raises:
        RemoteError: If Prefect's server failed.
        GivenUp: If no worker takes the runs.
        ConfigError: If the pool or its deployment is missing.
        QuiverError: Any error of the stage.
    """
    pool = call.where.pool
    require_server(f"placement.{call.stage} {pool}")
    started_at = time.monotonic()
    try:
        with get_client(sync_client=True) as client:
            runs = _PoolRuns(client, call)
            try:
                runs.start(tags)
                ref = runs.wait()
            finally:
                runs.cancel()
    except (httpx.HTTPError, PrefectHTTPStatusError) as error:
        raise RemoteError(
            f"pool {pool}",
            f"Prefect's server failed: {type(error).__name__}: {without_login(error)}",
            state=_STATE,
            next="prefect server start, then run again",
        ) from error
    store = Store(call.store)
    finished_at = time.monotonic()
    while True:
        try:
            manifest = store.open(ref).manifest
            break
        except LineageError:  # This host may see files of another host late.
            if time.monotonic() > finished_at + _STORE_LAG_SECONDS:
                raise
            time.sleep(0.5)
    seconds = round(time.monotonic() - started_at, 3)
    return Outcome(ref, False, manifest.rows, seconds, manifest.metrics)


def for_workers(call: Call) -> Call:
    """Return the call as a worker runs it on its host, with the store's absolute path and its id.

    It is shared if the stage can be, unless it is forced.
    """
    store = Store(call.store)
    share = getattr(load_stage(call.stage), "SHARED", False) and not call.force
    where = replace(call.where, pool=None, store_id=store.id, resident_engine=False)
    return replace(call, store=store.url, share=share, where=where)


@dataclass
class _PoolRuns:
    """The flow runs of one call in a pool."""

    client: SyncPrefectClient
    call: Call
    runs: list[FlowRun] = field(default_factory=list)
    failures: dict[UUID, QuiverError] = field(default_factory=dict)
    pending_since: dict[UUID, float] = field(default_factory=dict)
    """Time since which a worker has held a run without starting it, by run."""

    @property
    def pool(self) -> str:
        """Name of the pool."""
        return self.call.where.pool

    def start(self, tags: Sequence[str]) -> None:
        """Start a run for each of the call's workers, by default one per online worker; one if the
        stage is not shared.

        Raises ConfigError if the pool or its deployment is missing.
        """
        label = self.call.label
        online = self._online_workers()
        call = for_workers(self.call)
        count = (call.where.workers or max(1, len(online))) if call.share else 1
        if not online:
            log.warning(
                "%s: pool %s has no worker online; start one: prefect worker start --pool %s",
                label,
                self.pool,
                self.pool,
            )
        log.info("%s: %d run%s in pool %s", label, count, "s" if count > 1 else "", self.pool)
        for number in range(1, count + 1):
            numbered = label if count == 1 else f"{label} ({number} of {count})"
            parameters = {"call": replace(call, label=numbered).to_json()}
            try:
                with _starting:
                    run = run_deployment(
                        f"stage/{self.pool}",
                        parameters=parameters,
                        flow_run_name=numbered,
                        tags=list(tags),
                        timeout=0,
                        idempotency_key=str(uuid4()),
                    )
            except ObjectNotFound:
                raise ConfigError(
                    f"placement.{self.call.stage} {self.pool}",
                    f"the server has no deployment stage/{self.pool}",
                    next=f"quiver deploy RECIPE --pool {self.pool}",
                ) from None
            self.runs.append(run)

    def wait(self) -> str:
        """Return the reference that one of the runs answers.

        Raises:
            QuiverError: The error of a failed run, if all have failed.
            GivenUp: If no worker takes the runs.
            ResourceError: If the stage exceeds its time limit.
            Stopped: If this work was stopped.
        """
        wait_seconds, limit = self.call.where.wait_seconds, self.call.where.timeout_seconds
        waiting_since = time.monotonic()
        running_since = None
        while True:
            self._refresh()
            ref = self._finished_ref()
            if ref is not None:
                return ref
            now = time.monotonic()
            if any(run.state.is_running() for run in self.runs):
                running_since = running_since or now
            elif running_since is not None:
                waiting_since = now
                running_since = None
            if len(self.failures) == len(self.runs):
                # Prefer any other error: a crash says least.
                raise max(
                    self.failures.values(),
                    key=lambda error: not isinstance(error, ResourceError),
                )
            if running_since is None and now > waiting_since + wait_seconds:
                self._require_workers()
                waiting_since = now
            if running_since and limit and now > running_since + limit + _OVERTIME_SECONDS:
                raise ResourceError(
                    f"stage {self.call.stage}",
                    f"it has not reported its end {_OVERTIME_SECONDS} s after its limit of "
                    f"{limit:g} s",
                    state=_STATE,
                    next="check the pool's workers, then run again",
                )
            if is_stopped():
                raise Stopped(self.call.label)
            time.sleep(POLL_SECONDS)

    def _refresh(self) -> None:
        """Read the runs' states from the server.

        Waits for a server that does not answer; a run that the server lost counts as crashed.
        """
        since = time.monotonic()
        runs = FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in self.runs]))
        while True:
            try:
                answer = self.client.read_flow_runs(flow_run_filter=runs)
                break
            except (httpx.TransportError, PrefectHTTPStatusError) as error:
                response = getattr(error, "response", None)
                is_refusal = response is not None and response.status_code < 500
                if is_refusal or time.monotonic() > since + _SERVER_GONE_SECONDS:
                    raise
                log.warning(
                    "Prefect's server does not answer (%s); trying again", type(error).__name__
                )
                time.sleep(5)
        by_id = {run.id: run for run in answer}
        lost = State(type=StateType.CRASHED, message="the server does not know it")
        for index, run in enumerate(self.runs):
            found = by_id.get(run.id)
            if found is None:
                self.runs[index] = run.model_copy(update={"state": lost})
            elif found.state is not None:  # A server that is deleting a run answers it without.
                self.runs[index] = found

    def _finished_ref(self) -> str | None:
        """Return the reference that a finished run answered, if any; record the errors of failed
        runs."""
        stage = f"stage {self.call.stage}"
        for run in self.runs:
            if run.id in self.failures:
                continue
            if run.state.is_pending():
                now = time.monotonic()
                if now > self.pending_since.setdefault(run.id, now) + self.call.where.wait_seconds:
                    self.failures[run.id] = ResourceError(
                        stage,
                        f"a worker took {run.name!r} but did not start it within "
                        f"{self.call.where.wait_seconds:g} s",
                        state=_STATE,
                        next=f"prefect flow-run logs {run.id}",
                    )
                continue
            self.pending_since.pop(run.id, None)
            if not run.state.is_final():
                continue
            answer = answer_in(run.state.message) or {}
            if run.state.is_completed() and "ref" in answer:
                return answer["ref"]
            if "error" in answer:
                error = answer["error"]
            elif run.state.type == StateType.CANCELLED:
                error = GivenUp(
                    stage,
                    f"its flow run {run.name!r} was cancelled",
                    state=_STATE,
                    next="run again; it continues from there",
                )
            else:
                error = ResourceError(
                    stage,
                    f"its flow run {run.name!r} ended as {run.state.name}: "
                    f"{printable(run.state.message or 'no message')}",
                    state=_STATE,
                    next=f"prefect flow-run logs {run.id}",
                )
            self.failures[run.id] = error
            log.warning("%s: %s", run.name, error.message)
        return None

    def _require_workers(self) -> None:
        """Raise GivenUp if no worker of the pool is online or the pool is paused; else log a
        warning."""
        online = self._online_workers()
        if self.client.read_work_pool(self.pool).is_paused:
            reason = "it is paused"
            command = f"prefect work-pool resume {self.pool}"
        elif not online:
            reason = "none is online"
            command = f"prefect worker start --pool {self.pool}"
        else:
            log.warning(
                "%s waits for a free worker of pool %s: %s",
                self.call.label,
                self.pool,
                ", ".join(online),
            )
            return
        raise GivenUp(
            f"pool {self.pool}",
            f"no worker took up {self.call.label!r} within {self.call.where.wait_seconds:g} s "
            f"(placement.wait_seconds): {reason}",
            state=_STATE,
            next=command,
        )

    def _online_workers(self) -> list[str]:
        try:
            workers = self.client.read_workers_for_work_pool(self.pool)
        except PrefectHTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            raise ConfigError(
                f"pool {self.pool}",
                "the server has no such work pool",
                next=f"quiver deploy RECIPE --pool {self.pool}",
            ) from None
        return [worker.name for worker in workers if worker.status.value == "ONLINE"]

    def cancel(self) -> None:
        """Cancel unfinished runs: a worker ends the process and its stage, and waiting runs do not
        start."""
        for run in self.runs:
            if not run.state.is_final():
                try:
                    self.client.set_flow_run_state(run.id, State(type=StateType.CANCELLING))
                except Exception as error:  # This must not hide the error that ended the stage.
                    log.warning("%s could not be cancelled: %s", run.name, printable(error))


def answer_in(message: str | None) -> dict[str, Any] | None:
    """Parse the last message of a run of `stage`: {"ref", "cached"} or {"error": QuiverError}.

    None if the run ended before it wrote one.
    """
    try:
        answer = json.loads((message or "").rpartition("\n")[2])
    except ValueError:
        return None
    if not isinstance(answer, dict):
        return None
    return {"error": from_dict(answer["error"])} if "error" in answer else answer
