"""Commands that put a recipe on a schedule: in this process, or on workers of a Prefect server."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Annotated, Any, Literal

import typer

from . import completion
from .shared import RecipeFile, Settings, StorePath, read_recipe, say

Cron = Annotated[str | None, typer.Option(help='schedule in cron notation, e.g. "0 2 * * *"')]
Timezone = Annotated[
    str | None, typer.Option(help="time zone of --cron, e.g. Europe/Berlin; default: UTC")
]
IfRunning = Annotated[
    Literal["queue", "skip"],
    typer.Option(help="if a run is due while the last one still runs: wait, or leave it out"),
]
On = Annotated[
    list[str] | None,
    typer.Option(
        help="RUN/KIND: each new version starts a run; RUN/policy@TAG: each move of the tag does; "
        "may be repeated",
        autocompletion=completion.datasets,
    ),
]
Now = Annotated[bool, typer.Option("--now", help="also start a run at once")]


def room_above(name: str) -> Any:
    """Import a module of `deployments` by name.

    Only the commands may use that package, which lies above this one, so it is not imported
    statically.
    """
    return importlib.import_module(f"quiver.deployments.{name}")


def serve(
    recipe: RecipeFile,
    cron: Cron = None,
    timezone: Timezone = None,
    if_running: IfRunning = "queue",
    on: On = None,
    now: Now = False,
    port: Annotated[
        int | None,
        typer.Option(
            help="port of the server that is started if PREFECT_API_URL is not set",
            min=1,
            max=65535,
        ),
    ] = None,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Run a recipe on a schedule from this process. For a laptop: until Ctrl-C, without work
    pools."""
    loaded = read_recipe(recipe, settings, store)
    where = room_above("deploy").Where("", cron, timezone, if_running, tuple(on or ()), now=now)

    room_above("serve").serve(loaded, where, port, partial(say, lines=[]))


def deploy(
    recipe: RecipeFile,
    pool: Annotated[str, typer.Option(help="work pool whose workers run it")],
    cron: Cron = None,
    timezone: Timezone = None,
    if_running: IfRunning = "queue",
    on: On = None,
    image: Annotated[
        str | None, typer.Option(help="container image, for pools of type docker or kubernetes")
    ] = None,
    folder: Annotated[
        str | None,
        typer.Option(help="folder of the recipe's relative paths, e.g. one inside the image"),
    ] = None,
    now: Now = False,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Register a recipe with a Prefect server. The options name its workers, its schedule and other
    triggers."""
    module = room_above("deploy")
    where = module.Where(pool, cron, timezone, if_running, tuple(on or ()), image, folder, now)
    outcome = module.deploy(read_recipe(recipe, settings, store), where)

    def word(entry: dict[str, Any]) -> str:
        return "new" if entry["new"] else "changed" if entry["changed"] else "unchanged"

    lines = [
        f"{word(entry):<10} {entry['name']}  (work pool {entry['pool']})"
        for entry in outcome["deployments"]
    ]
    lines.append(f"each time: {outcome['each']}")
    for entry in outcome["automations"]:
        lines.append(f"{word(entry):<10} automation {entry['name']}")
    if outcome["flow_run"]:
        lines.append(f"started flow run {outcome['flow_run']}")
    say(outcome, lines)
