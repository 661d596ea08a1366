"""Commands that put a recipe on a schedule: from this process, or on the workers of a Prefect
server."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from quiver.schemas.errors import ConfigError, printable

from .shared import Debug, Json, RecipeFile, Settings, StorePath, read_recipe, say

Cron = Annotated[str | None, typer.Option(help='when, as cron says it, e.g. "0 2 * * *"')]
Timezone = Annotated[
    str | None, typer.Option(help="whose clock --cron goes by, e.g. Europe/Berlin; default: UTC")
]
Overlap = Annotated[
    str, typer.Option(help="a run that is due while the last one still runs: queue or skip")
]
On = Annotated[
    list[str] | None,
    typer.Option(
        help="RUN/KIND: each new version there starts a run; RUN/policy@TAG: each move of the "
        "tag; may stand twice"
    ),
]
Now = Annotated[bool, typer.Option("--now", help="start a run at once, too")]


def _room_above(name: str) -> Any:
    """A module of `deployments`: named, as a recipe names code, since nothing here knows of the
    room above but its commands."""
    return importlib.import_module(f"quiver.deployments.{name}")


def _check_schedule(cron: str | None, timezone: str | None, overlap: str) -> str:
    """The timezone of the schedule. ConfigError where the options do not fit each other."""
    if timezone and not cron:
        raise ConfigError(
            f"--timezone {printable(timezone)}",
            "there is no schedule that could go by it",
            next='leave --timezone out, or say when: --cron "0 2 * * *"',
        )
    if overlap not in ("queue", "skip"):
        raise ConfigError(
            f"--overlap {printable(overlap)}", "expected queue or skip", next="correct --overlap"
        )
    return timezone or "UTC"


def serve(
    recipe: RecipeFile,
    cron: Cron = None,
    timezone: Timezone = None,
    overlap: Overlap = "queue",
    on: On = None,
    now: Now = False,
    port: Annotated[
        int | None,
        typer.Option(
            help="of the server that is started where PREFECT_API_URL names none", min=1, max=65535
        ),
    ] = None,
    store: StorePath = None,
    settings: Settings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a recipe on a schedule from this very process, until Ctrl-C: for a laptop, without work
    pools."""
    clock = _check_schedule(cron, timezone, overlap)
    loaded = read_recipe(recipe, settings, store)

    def tell(served: dict[str, Any]) -> None:
        if json:
            say(True, served, [])

    module = _room_above("serve")
    module.serve(loaded, cron, clock, overlap, tuple(on or ()), now, port, tell)


def deploy(
    recipe: RecipeFile,
    pool: Annotated[str, typer.Option(help="work pool whose workers run it")],
    cron: Cron = None,
    timezone: Timezone = None,
    overlap: Overlap = "queue",
    on: On = None,
    image: Annotated[
        str | None, typer.Option(help="container image, for pools of type docker or kubernetes")
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(help="folder that relative paths are taken from, of the image, say"),
    ] = None,
    now: Now = False,
    store: StorePath = None,
    settings: Settings = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Register a recipe with a Prefect server: which workers run it, when, and what starts it
    besides."""
    module = _room_above("deploy")
    clock = _check_schedule(cron, timezone, overlap)
    where = module.Where(pool, cron, clock, overlap, tuple(on or ()), image, folder, now)
    outcome = module.deploy(read_recipe(recipe, settings, store), where)
    word = {True: "changed", False: "unchanged"}
    lines = [
        f"{word[entry['changed']]:<10} {entry['name']}  (work pool {entry['pool']})"
        for entry in outcome["deployments"]
    ]
    for entry in outcome["automations"]:
        lines.append(f"{word[entry['changed']]:<10} automation {entry['name']}")
    if outcome["flow_run"]:
        lines.append(f"started flow run {outcome['flow_run']}")
    say(json, outcome, lines)
