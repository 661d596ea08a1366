"""The next step that an error names, completed to a command that works in this shell.

A stage knows neither the recipe's file nor the store's name: it says `quiver reward RECIPE
--rollouts a/rollouts@1`. The command line fills in its own arguments.

>>> complete("quiver verify a/rewards@1", Called(store="my store"), {"verify": {"--store"}})
"quiver verify a/rewards@1 --store 'my store'"
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Called:
    """Arguments of the running command that the next command needs too."""

    store: str | None = None
    recipe: Path | None = None
    settings: tuple[str, ...] = ()


def program() -> str:
    """Return Quiver's command as typed here: its name if the shell finds this one, else its
    path."""
    called = Path(sys.argv[0])
    found = shutil.which("quiver")
    if called.name != "quiver" or (found and called.absolute() == Path(found).absolute()):
        return "quiver"
    below_here = called.absolute().is_relative_to(Path.cwd())
    return str(called.absolute().relative_to(Path.cwd())) if below_here else str(called)


def default_store() -> str:
    """Return the store of commands without --store."""
    return os.environ.get("QUIVER_STORE") or "store"


def command_line() -> str:
    """Return the running command as a shell line."""
    return shlex.join([program(), *sys.argv[1:]])


def set_options(settings: Iterable[str]) -> list[str]:
    """Return the recipe's settings as options of a command."""
    return [word for setting in settings for word in ("--set", setting)]


def options_in(commands: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the options of each of `commands` (made by typer), by its name."""
    return {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in commands.items()
    }


def complete(next: str, called: Called, options: Mapping[str, set[str]]) -> str:
    """Return `next` with the recipe in place of RECIPE, and with the settings and store of this
    call.

    Text that is no command of ours is returned unchanged. `options`: each command's, by its name.
    """
    if not next.startswith("quiver "):
        return next
    words = [program(), *shlex.split(next)[1:]]
    if "RECIPE" in words and called.recipe:
        words[words.index("RECIPE")] = str(called.recipe)
        words += set_options(called.settings)
    takes_store = "--store" in options.get(words[1], ()) and "--store" not in words
    if takes_store and called.store not in (None, default_store()):
        words += ["--store", called.store]
    return shlex.join(words)
