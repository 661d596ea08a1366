"""What an error says to do next, as a command that a shell takes at this very place.

A stage knows neither the recipe's file nor how the store was named: it says `quiver reward RECIPE
--rollouts a/rollouts@1`. The command line puts in what it was given itself.

>>> complete("quiver verify a/rewards@1", Called(store="my store"), {"verify": {"--store"}}.get)
"quiver verify a/rewards@1 --store 'my store'"
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Called:
    """How the command that runs now was called, as far as the next one needs it too."""

    store: str | None = None
    recipe: Path | None = None
    settings: tuple[str, ...] = ()
    num_made: int = 0
    """Versions that it has made so far."""


def program() -> str:
    """Quiver's command as a person types it here: by its name where the shell finds this one, or
    the path from here."""
    called = Path(sys.argv[0])
    found = shutil.which("quiver")
    if called.name != "quiver" or (found and called.absolute() == Path(found).absolute()):
        return "quiver"
    below_here = called.absolute().is_relative_to(Path.cwd())
    return str(called.absolute().relative_to(Path.cwd())) if below_here else str(called)


def default_store() -> str:
    """The store of commands that are given none."""
    return os.environ.get("QUIVER_STORE") or "store"


def command_line() -> str:
    """The command that runs now, as a shell takes it."""
    return shlex.join([program(), *sys.argv[1:]])


def set_options(settings: Iterable[str]) -> list[str]:
    """The recipe's settings as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def options_in(commands: Mapping[str, Any]) -> Callable[[str], set[str]]:
    """The options of one of `commands` (as typer makes them), by its name; none of one that is not
    there."""

    def options_of(name: str) -> set[str]:
        if name not in commands:
            return set()
        return {option for parameter in commands[name].params for option in parameter.opts}

    return options_of


def complete(next: str, called: Called, options_of: Callable[[str], set[str]]) -> str:
    """`next` with the recipe in place of RECIPE, and with the settings and store of this call;
    anything that is no command of ours as it is. `options_of`: the options of a command, by its
    name."""
    if not next.startswith("quiver "):
        return next
    words = [program(), *shlex.split(next)[1:]]
    if "RECIPE" in words and called.recipe:
        words[words.index("RECIPE")] = str(called.recipe)
        words += set_options(called.settings)
    takes_store = "--store" in options_of(words[1]) and "--store" not in words
    if takes_store and called.store not in (None, default_store()):
        words += ["--store", called.store]
    return shlex.join(words)
