"""What every command shares: its options, the recipe and the store that it is about, and how it
answers."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from .next_step import Called, default_store

if TYPE_CHECKING:
    from quiver.stages.common.store import Store

    from ..recipe import Recipe

CALLED = Called()
"""The recipe, settings and store of the command that runs, for what its error says to do next."""
_stdout: TextIO | None = None
RecipeFile = Annotated[Path, typer.Argument(help="the recipe, a TOML file", metavar="RECIPE")]
Reference = Annotated[str, typer.Argument(help="run/kind@version", metavar="REF")]
StorePath = Annotated[str | None, typer.Option("--store", help="folder of the store")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE over the recipe's, e.g. optimize.learning_rate=1e-6"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object as the last line of stdout")]
Debug = Annotated[bool, typer.Option("--debug", help="traceback of an error")]
Force = Annotated[
    bool, typer.Option("--force", help="do it anew, even where a finished version exists")
]
NamedVersion = typer.Option(help="run/kind@version; default: the run's latest")
NamedVersions = typer.Option(
    help="run/kind@version; default: the run's latest. For optimize it may stand several times "
    "(replay)"
)


def keep_stdout() -> None:
    """From now on only `say` reaches the stdout that this process was started with; what libraries
    and a user's reward print, as it is imported, goes to stderr."""
    global _stdout  # noqa: PLW0603
    _stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def say(as_json: bool, answer: dict[str, Any], lines: list[str]) -> None:
    """The command's answer."""
    text = "\n".join(lines)
    if as_json:
        text = json.dumps(_as_json(answer), ensure_ascii=False)
    print(text, file=_stdout or sys.stdout, flush=True)


def read_recipe(path: Path, settings: list[str] | None, store: str | None) -> Recipe:
    """The recipe in `path` with the command's settings and store over it."""
    from ..recipe import load

    settings = settings or []
    CALLED.recipe = path
    CALLED.settings = tuple(settings)
    CALLED.store = store
    recipe = load(path, [*settings, f"store={json.dumps(store)}"] if store else settings)
    CALLED.store = recipe.store
    return recipe


def open_store(path: str | None) -> Store:
    """The store that is there already, at `path` or where stores are."""
    from quiver.stages.common.store import Store

    CALLED.store = path
    return Store(path or default_store(), create=False)


def _as_json(answer: Any) -> Any:
    """`answer` as JSON has it: a number that is not finite is null, a date or anything else of the
    user's columns its text."""
    if isinstance(answer, dict):
        return {str(key): _as_json(entry) for key, entry in answer.items()}
    if isinstance(answer, list | tuple):
        return [_as_json(entry) for entry in answer]
    if isinstance(answer, float):
        return answer if math.isfinite(answer) else None
    return answer if answer is None or isinstance(answer, str | int) else str(answer)
