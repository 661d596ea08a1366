"""Register a recipe on a Prefect server: its flow, work pools, schedule and triggers. Look here for
`quiver deploy`.

`deploy` registers `post-train/RUN` with a work pool (`nightly/RUN` if the recipe has a section
[promotion]), and `stage/POOL` with every pool that [placement] names. Paths are made absolute
first. A path that the workers could not see is refused before anything is registered. A
deployment's version is the hash of its content. Deploying the same again changes nothing: the
schedule's next runs stay, and what a person paused stays paused.

    deploy(load("recipe.toml"), Where(pool="gpu", cron="0 2 * * *", timezone="Europe/Berlin"))
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
    WorkPool,
)
from prefect.deployments.runner import EntrypointType, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.schedules import Cron, Schedule
from prefect.server.schemas.schedules import CronSchedule
from pydantic import ValidationError

from quiver.flows.post_train import post_train
from quiver.flows.prefect_server import without_login
from quiver.flows.recipe import Recipe, load
from quiver.flows.scheduled import recipe_for, scheduled
from quiver.flows.stage import stage
from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import digest

from .automations import HEARTBEAT_SECONDS, TAG, install, on_event, silent_runs
from .paths import check_runnable, check_visible, make_absolute
from .server import check_api

_STRATEGIES = {
    "queue": ConcurrencyLimitStrategy.ENQUEUE,
    "skip": ConcurrencyLimitStrategy.CANCEL_NEW,
}
_LOCAL = "process"
log = logging.getLogger("quiver")


@dataclass(frozen=True)
class Where:
    """Place and time of a deployment's runs."""

    pool: str = ""
    """Work pool whose workers run it; empty if the flow is served."""
    cron: str | None = None
    timezone: str | None = None
    """Time zone of `cron`. Default: UTC."""
    if_running: Literal["queue", "skip"] = "queue"
    """A run that is due while the last one still runs waits (queue) or does not run (skip)."""
    on: tuple[str, ...] = ()
    """RUN/KIND: each new version starts a run. RUN/KIND@TAG: each move of the tag does."""
    image: str | None = None
    """Container image for pools of other types than process. Refused if all are of type process."""
    folder: str | None = None
    """Folder of the recipe's relative paths, for example one inside the image. Default: the folder
    of the command."""
    now: bool = False
    """Start a run at once."""


def deploy(recipe: Recipe, where: Where) -> dict[str, Any]:
    """Register everything. Returns the deployments and automations by name, and for each whether it
    is new or changed. Raises before anything is registered."""
    url = check_api()
    with get_client(sync_client=True) as client:
        names = dict.fromkeys([where.pool, *recipe.placement.pools.values()])
        pools = {name: _pool(client, name) for name in names}
        if where.image and all(pool.type == _LOCAL for pool in pools.values()):
            raise ConfigError(
                f"--image {printable(where.image)}",
                f"work pool {', '.join(pools)} is of type {_LOCAL}: its runs use the Quiver of "
                "their worker, and no image",
                next="leave --image out, or name a pool of type docker or kubernetes: --pool NAME",
            )
        absolute = _seen_from(recipe, pools, where.folder)
        main, purpose = described(absolute, where, **_work(pools[where.pool], where))
        deployments = [main]
        for name in dict.fromkeys(recipe.placement.pools.values()):
            work = _work(pools[name], where)
            deployments.append(
                RunnerDeployment.from_flow(
                    stage, name=name, tags=[TAG], entrypoint_type=EntrypointType.MODULE_PATH, **work
                )
            )
        for deployment in deployments:
            fields = deployment.model_dump(mode="json", exclude={"version", "storage"})
            form = deployment._parameter_openapi_schema.model_dump(mode="json")
            deployment.version = digest([fields, deployment.entrypoint, form])[:12]
        entries = [
            {
                "name": deployment.full_name,
                "pool": deployment.work_pool_name,
                **_register(client, deployment),
            }
            for deployment in deployments
        ]
        automations = [{"name": silent_runs().name, **install(client, silent_runs())}]
        started = start_run(client, main) if where.now else None
    automations += [
        {"name": trigger.name, **{key: entries[0][key] for key in ("new", "changed")}}
        for trigger in main.triggers
    ]
    return {
        "api": without_login(url),
        "deployments": entries,
        "each": purpose,
        "automations": automations,
        "flow_run": started,
    }


def recipe_parameters(
    file: str,
    pool: str,
    folder: str | None = None,
    settings: list[str] | None = None,
    nightly: bool = False,
) -> dict[str, Any]:
    """Return the recipe in `file` as parameters: a build step of prefect.yaml, used as
    `{{ id.recipe }}`. It makes the checks of `deploy`.

    Args:
        nightly: True if the entry point is quiver.flows.nightly.nightly, which a recipe with
            [promotion] needs.
    """
    check_api()
    recipe = load(file, settings or [])
    if nightly != ("promotion" in recipe.model_fields_set):
        has, name = ("no", "scheduled") if nightly else ("a", "nightly")
        raise ConfigError(
            f"recipe {printable(file)}",
            f"has {has} section [promotion], so its entry point is quiver.flows.{name}.{name}",
            next=f"name that in entrypoint, and set nightly: {str(not nightly).lower()} in the "
            "inputs of the build step",
        )
    with get_client(sync_client=True) as client:
        install(client, silent_runs())
        absolute = _seen_from(recipe, {pool: _pool(client, pool)}, folder)
        return {"recipe": absolute.model_dump(mode="json", exclude_unset=True)}


# -- what is to be there


def described(recipe: Recipe, where: Where, **more: Any) -> tuple[RunnerDeployment, str]:
    """Return the recipe's own deployment, and in one line what each of its runs does.

    Its flow is `nightly` if the recipe has a section [promotion], else `post-train`. With a section
    [schedule], a cron or a trigger, `post-train` follows [schedule]. It runs once at a time. Keys
    that the recipe does not set stay unset, so that a section without a value still takes the run's
    value. Raises ConfigError.
    """
    if "promotion" in recipe.model_fields_set:
        from quiver.flows.nightly import nightly

        flow, purpose = nightly, "one night"
    else:
        recipe.data.require_filled_in()
        flow, purpose = post_train, "the rest of the recipe"
        if where.cron or where.on or "schedule" in recipe.model_fields_set:
            flow = scheduled
            purpose = {
                "go on": f"{recipe.iterations} more iterations",
                "again": f"a run {recipe.run}-DATE from the base, with the next seed",
                "same": "the rest of the recipe; nothing from the second time on",
            }[recipe.schedule.each]
            if recipe.schedule.each == "again":
                recipe_for(recipe, datetime(2000, 1, 1))  # Raises if the name would get too long.
    deployment = RunnerDeployment.from_flow(
        flow,
        name=recipe.run,
        parameters={"recipe": recipe.model_dump(mode="json", exclude_unset=True)},
        schedules=_schedules(where),
        concurrency_limit=ConcurrencyLimitConfig(
            limit=1, collision_strategy=_STRATEGIES[where.if_running]
        ),
        triggers=[on_event(source, f"{flow.name}/{recipe.run}") for source in where.on],
        tags=[TAG],
        entrypoint_type=EntrypointType.MODULE_PATH,
        **more,
    )
    return deployment, purpose


def _schedules(where: Where) -> list[Schedule]:
    timezone = where.timezone or "UTC"
    if where.cron is None:
        if where.timezone:
            raise ConfigError(
                f"--timezone {printable(timezone)}",
                "without --cron there is no schedule to use it",
                next='leave --timezone out, or name a schedule: --cron "0 2 * * *"',
            )
        return []
    try:
        # Prefect checks part of it only when it registers
        schedule = CronSchedule(cron=where.cron, timezone=timezone)
        asyncio.run(schedule.get_dates(1))  # fails for a date that never comes, such as 30 February
    except ValueError as error:  # pydantic's ValidationError is one too
        raise ConfigError(
            f"--cron {printable(where.cron)} --timezone {printable(timezone)}",
            printable(error.errors()[0]["msg"] if isinstance(error, ValidationError) else error),
            next='correct it, e.g. --cron "0 2 * * *" --timezone Europe/Berlin',
        ) from None
    return [Cron(where.cron, timezone=timezone, slug="cron")]


def _work(pool: WorkPool, where: Where) -> dict[str, Any]:
    """Return the pool and the job variables to override: the image and the heartbeats. The worker
    merges them with the pool's own environment when a run starts."""
    env = {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)}
    variables: dict[str, Any] = {"env": env}
    if pool.type != _LOCAL:
        image = where.image or _default(pool, "image") or ""
        if not image or image.startswith("prefecthq/"):
            raise ConfigError(
                f"work pool {pool.name}",
                f"is of type {pool.type} and names no image with Quiver in it",
                next="build deployments/Dockerfile, then give its name: --image NAME",
            )
        variables["image"] = image
    return {"work_pool_name": pool.name, "job_variables": variables}


# -- what there is


def _pool(client: SyncPrefectClient, name: str) -> WorkPool:
    try:
        return client.read_work_pool(name)
    except ObjectNotFound:
        raise ConfigError(
            f"work pool {printable(name)}",
            "the server has no such work pool",
            next=f"prefect worker start --pool {name} --type process",
        ) from None


def _seen_from(recipe: Recipe, pools: dict[str, WorkPool], folder: str | None) -> Recipe:
    """Return `recipe` with absolute paths. Refuse paths that workers of these pools cannot see, as
    far as that can be known."""
    containers = [pool for pool in pools.values() if pool.type != _LOCAL]
    absolute, paths = make_absolute(
        recipe, f"work pool {next(iter(pools))}", folder=folder, must_exist=not containers
    )
    if not containers:
        check_runnable(absolute, paths)
    for pool in containers:
        # a container sees the host's folder under the same path only if a volume says `PATH:PATH`
        volumes = [str(volume).split(":") for volume in _default(pool, "volumes") or []]
        mounts = tuple(
            parts[0] for parts in volumes if parts[:1] == parts[1:2] and parts[0].startswith("/")
        )
        check_visible(paths, mounts, f"work pool {pool.name} (type {pool.type})")
    return absolute


def _default(pool: WorkPool, variable: str) -> Any:
    """Return the default of a job variable in the pool's template, or None."""
    properties = pool.base_job_template.get("variables", {}).get("properties", {})
    return properties.get(variable, {}).get("default")


def _register(client: SyncPrefectClient, deployment: RunnerDeployment) -> dict[str, bool]:
    """Create or update a deployment. Returns whether it is `new`, and whether it is `changed`;
    neither if the server has this version with all its triggers."""
    try:
        registered = client.read_deployment_by_name(deployment.full_name)
    except ObjectNotFound:
        registered = None
    if registered and registered.version == deployment.version:
        automations = client.read_resource_related_automations(
            f"prefect.deployment.{registered.id}"
        )
        names = {automation.name for automation in automations}
        if all(trigger.name in names for trigger in deployment.triggers):
            return {"new": False, "changed": False}
    deployment.apply()
    # for the server an empty list means "keep the schedules", so they are deleted one by one
    if registered and not deployment.schedules:
        for schedule in registered.schedules:
            client.delete_deployment_schedule(registered.id, schedule.id)
    return {"new": registered is None, "changed": registered is not None}


def start_run(client: SyncPrefectClient, deployment: RunnerDeployment) -> str:
    """Start a run of a registered deployment and return its id. The key keeps it one run if the
    server is busy: it may have made the run when Prefect's client asks again."""
    registered = client.read_deployment_by_name(deployment.full_name)
    once = {"idempotency_key": str(uuid4())}
    return str(client.create_flow_run_from_deployment(registered.id, **once).id)
