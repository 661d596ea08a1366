"""Code that all commands share: options, reading the recipe and the store, and the answer."""

from __future__ import annotations

import base64
import inspect
import json
import math
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from quiver.flows.look.words import counted
from quiver.schemas.errors import for_terminal

from . import completion
from .next_step import Called, default_store

if TYPE_CHECKING:
    from quiver.flows.recipe import Recipe
    from quiver.stages.core.run.call import Outcome
    from quiver.stages.core.store import Store

CALLED = Called()
"""Recipe, settings and store of the running command, for the next step that an error names."""
_stdout: TextIO | None = None
RecipeFile = Annotated[Path, typer.Argument(help="the recipe, a TOML file", metavar="RECIPE")]
Reference = Annotated[
    str,
    typer.Argument(help="run/kind@version", metavar="REF", autocompletion=completion.references),
]


def or_latest(ref: str) -> str:
    """Return a reference unchanged; for `run/kind`, its latest version."""
    return ref if "@" in ref or "/" not in ref else f"{ref}@latest"


ReadReference = Annotated[
    str,
    typer.Argument(
        help="run/kind@version; run/kind is its latest",
        metavar="REF",
        callback=or_latest,
        autocompletion=completion.references,
    ),
]
"""Argument of commands that only read."""
StorePath = Annotated[str | None, typer.Option("--store", help="folder or URL of the store")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="KEY=VALUE in place of the recipe's, e.g. optimize.learning_rate=1e-6",
        autocompletion=completion.settings,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="make a new version, even if a finished one exists")
]
Note = Annotated[str, typer.Option(help="your words about the new versions, shown by ls and show")]
_EVERY = {
    "json": "one JSON object as the last line of stdout",
    "debug": "show the traceback of an error",
}
"""Options that every command takes, with their help; `main` handles them."""
NamedVersion = typer.Option(
    help="run/kind@version; default: the run's latest", autocompletion=completion.references
)
NamedVersions = typer.Option(
    help="run/kind@version; default: the run's latest. For optimize it may be repeated (replay)",
    autocompletion=completion.references,
)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` for the command line, with the options that every command takes."""

    @wraps(command)
    def run(json: bool, debug: bool, **options: Any) -> None:
        command(**options)

    signature = inspect.signature(command, eval_str=True)
    every = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[bool, typer.Option(f"--{name}", help=help)],
        )
        for name, help in _EVERY.items()
    ]
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *every])
    return run


def keep_stdout() -> None:
    """Make `say` answer in JSON, and keep all other output from stdout.

    Prints of libraries and of a user's reward code, also during import, go to stderr.
    """
    global _stdout  # noqa: PLW0603
    _stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)


def nobody_reads() -> bool:
    """True if the other end of stdout or stderr is closed, for example a pipe to an ended
    command."""
    poll = select.poll()
    for number in (_stdout.fileno() if _stdout else 1, 2):
        poll.register(number, 0)  # Errors only, which poll always reports.
    return bool(poll.poll(0))


def made_line(outcome: Outcome) -> str:
    """Return a line about a version that a stage made, or that was there already."""
    seconds = "already done" if outcome.cached else f"{outcome.seconds:.1f} s"
    rows = [counted(outcome.rows, "row")] if outcome.rows else []  # a policy has none
    return "  ".join([outcome.ref, *rows, seconds])


@contextmanager
def by_hand(recipe: Recipe, note: str = "") -> Iterator[None]:
    """Let calls of a recipe's run inside do without Prefect, and show them live."""
    from quiver.flows import calls
    from quiver.flows.look.live import shown_live

    with shown_live(), calls.by_hand(recipe, note=note):
        yield


def answers_in_json() -> bool:
    """True if `say` answers in JSON, so that lines for people are not needed."""
    return _stdout is not None


def say(answer: dict[str, Any], lines: list[str]) -> None:
    """Print the command's answer: as JSON after `keep_stdout`, else as `lines`."""
    text = to_json(answer) if _stdout else for_terminal("\n".join(lines))
    if text:
        print(text, file=_stdout, flush=True)


def read_recipe(
    path: Path, settings: list[str] | None, store: str | None, *, measures: bool = True
) -> Recipe:
    """Read the recipe in `path` with the command's settings over it.

    The store is --store, else QUIVER_STORE, else the recipe's. `measures` is passed to
    `Recipe.load`: false for commands that do not measure policies, so that a recipe whose
    [evaluate] does not fit its [reward] can still be used to score, train or look.
    """
    from quiver.flows.recipe import load

    settings = settings or []
    CALLED.recipe = path
    CALLED.settings = tuple(settings)
    if not any(setting.partition("=")[0].strip() == "store" for setting in settings):
        store = store or os.environ.get("QUIVER_STORE")
    CALLED.store = store
    settings = [*settings, f"store={json.dumps(store)}"] if store else settings
    recipe = load(path, settings, measures=measures)
    CALLED.store = recipe.store
    return recipe


def open_store(path: str | None) -> Store:
    """Open the existing store at `path`. Default: QUIVER_STORE, else "store"."""
    from quiver.stages.core.store import Store

    CALLED.store = path
    return Store(path or default_store(), create=False)


class _Written(str):
    """Finished JSON text."""


def to_json(answer: Any) -> str:
    """Return `answer` as JSON text.

    A number that is not finite becomes null, bytes (pictures) base64, and dates and other types of
    the user's columns their text. This is a loop, since a lineage is as deep as its line of
    policies is long.
    """
    text: list[str] = []
    waiting = [answer]
    while waiting:
        part = waiting.pop()
        if isinstance(part, _Written):
            text.append(part)
        elif isinstance(part, dict | list | tuple):
            is_dict = isinstance(part, dict)
            pieces: list[Any] = []
            for key, entry in part.items() if is_dict else enumerate(part):
                separator = ", " if pieces else ""
                name = f"{_quoted(str(key))}: " if is_dict else ""
                pieces += [_Written(separator + name), entry]
            opening, closing = "{}" if is_dict else "[]"
            waiting += [_Written(closing), *reversed(pieces), _Written(opening)]
        elif isinstance(part, float) and not math.isfinite(part):
            text.append("null")
        elif isinstance(part, bytes):
            text.append(_quoted(base64.b64encode(part).decode()))
        else:
            leaf = part if part is None or isinstance(part, str | int | float) else str(part)
            text.append(_quoted(leaf))
    return "".join(text)


def _quoted(leaf: Any) -> str:
    """Return a leaf as JSON text; control characters are escaped, because terminals obey them."""
    text = json.dumps(leaf, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(leaf)
