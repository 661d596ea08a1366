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


def _overlap(overlap: str) -> str:
    if overlap not in ("queue", "skip"):
        raise ConfigError(
            f"--overlap {printable(overlap)}", "expected queue or skip", next="correct --overlap"
        )
    return overlap


def _timezone(timezone: str | None, cron: str | None) -> str:
    if timezone and not cron:
        next = 'leave --timezone out, or say when: --cron "0 2 * * *"'
        raise ConfigError(
            f"--timezone {printable(timezone)}",
            "there is no schedule that could go by it",
            next=next,
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
    clock, overlap, sources = _timezone(timezone, cron), _overlap(overlap), tuple(on or ())
    loaded = read_recipe(recipe, settings, store)

    def tell(served: dict[str, Any]) -> None:
        if json:
            say(True, served, [])

    _room_above("serve").serve(loaded, cron, clock, overlap, sources, now, port, tell)


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
    above = _room_above("deploy")
    where = above.Where(
        pool,
        cron,
        _timezone(timezone, cron),
        _overlap(overlap),
        tuple(on or ()),
        image,
        folder,
        now,
    )
    done = above.deploy(read_recipe(recipe, settings, store), where)
    word = {True: "changed", False: "unchanged"}
    lines = [
        f"{word[each['changed']]:<10} {each['name']}  (work pool {each['pool']})"
        for each in done["deployments"]
    ]
    lines += [
        f"{word[each['changed']]:<10} automation {each['name']}" for each in done["automations"]
    ]
    say(
        json,
        done,
        [*lines, *([f"started flow run {done['flow_run']}"] if done["flow_run"] else [])],
    )
