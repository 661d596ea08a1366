"""Serve a recipe from this process: a schedule for a laptop, without work pools and workers. Look
here for `quiver serve`.

The embedded server of `quiver run` has no scheduler and triggers nothing. So if PREFECT_API_URL is
not set, a real server is started on loopback and ends with this command. Runs are child processes.
A run that is due while the last one still runs waits, or is skipped. When this process ends, its
schedule is paused and its runs are cancelled. The finished shards of an unfinished stage are kept,
and serving again continues from there.

    serve(load("recipe.toml"), Where(cron="0 2 * * *", timezone="Europe/Berlin"))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from prefect.client.orchestration import get_client
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_API_PORT

from quiver.flows.prefect_server import without_login
from quiver.flows.recipe import Recipe
from quiver.schemas.errors import ConfigError

from .automations import HEARTBEAT_SECONDS, install, silent_runs
from .deploy import Where, described, start_run
from .paths import check_runnable, make_absolute
from .server import check_api, own_server

log = logging.getLogger("quiver")


def serve(
    recipe: Recipe,
    where: Where,
    port: int | None = None,
    tell: Callable[[dict[str, Any]], None] = lambda served: None,
) -> None:
    """Run `recipe` on the schedule of `where`, until SIGINT or SIGTERM. `where.pool` is ignored.

    Args:
        port: Port of the server to start. Default: Prefect's PREFECT_SERVER_API_PORT, 4200.
        tell: Called once with a summary: the API, deployment and schedule.

    Raises ConfigError if `port` is given although PREFECT_API_URL names a server.
    """
    if port and PREFECT_API_URL.value():
        named = without_login(PREFECT_API_URL.value())
        problem = f"no server is started: PREFECT_API_URL names one, {named}"
        advice = "leave --port out, or unset PREFECT_API_URL"
        raise ConfigError(f"--port {port}", problem, next=advice)
    absolute, paths = make_absolute(recipe, "a served run")
    deployment, purpose = described(absolute, where, paused=False)
    with ExitStack() as stack:
        if not PREFECT_API_URL.value():
            log.info(
                "PREFECT_API_URL is not set, and the embedded server keeps no schedules: starting "
                "a real one, on loopback"
            )
            stack.enter_context(own_server(port or PREFECT_SERVER_API_PORT.value()))
        url = without_login(check_api())
        check_runnable(absolute, paths)
        runner = Runner(name=f"quiver-{recipe.run}", heartbeat_seconds=HEARTBEAT_SECONDS)
        runner.add_deployment(deployment)
        with get_client(sync_client=True) as client:
            install(client, silent_runs())
            started = start_run(client, deployment) if where.now else None
        log.info("serving %s; pages: %s", deployment.full_name, url.removesuffix("/api"))
        timezone = where.timezone or "UTC"
        schedule = f"{where.cron} ({timezone})" if where.cron else "none; runs start by hand"
        log.info("schedule: %s; each time: %s", schedule, purpose)
        log.info("by hand: PREFECT_API_URL=%s prefect deployment run %s", url, deployment.full_name)
        tell(
            {
                "api": url,
                "deployment": deployment.full_name,
                "cron": where.cron,
                "timezone": timezone,
                "each": purpose,
                "flow_run": started,
            }
        )
        logging.getLogger("prefect.runner.state_proposer").addFilter(said_once())
        _run(runner)


def said_once() -> Callable[[logging.LogRecord], bool]:
    """Return a filter that logs once per flow run that it is due and waits for the last run.
    Prefect asks its server every few seconds, and logs each refusal as an aborted submission."""
    waiting: set[str] = set()

    def is_logged(record: logging.LogRecord) -> bool:
        match record.args:
            case (flow_run_id, "SCHEDULED") if "non-pending state" in record.getMessage():
                is_new = str(flow_run_id) not in waiting
                waiting.add(str(flow_run_id))
                record.msg = "flow run %s is due; it waits until the last one has ended"
                record.args = (flow_run_id,)
                return is_new
        return True

    return is_logged


def _run(runner: Runner) -> None:
    """Run until a signal. SIGTERM is handled like Ctrl-C, because Prefect's own handler leaves the
    runs behind."""

    async def until_stopped() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        runner.handle_sigterm = lambda *_: loop.call_soon_threadsafe(task.cancel)
        await runner.start()

    try:
        asyncio.run(until_stopped())
    except asyncio.CancelledError:
        raise SystemExit(143) from None
