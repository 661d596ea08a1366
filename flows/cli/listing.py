"""Commands that list recipe keys, algorithms, rewards and engines."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer

from quiver.schemas.errors import printable

from . import completion
from .shared import say

log = logging.getLogger("quiver")


def _list(word: str, entries: list[dict[str, Any]], details: str) -> None:
    """Print `entries`, one per line, each followed by its `details` and its reference."""
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']:<24} {entry['description']}")
        notes = [f"{key}: {detail}" for key, detail in (entry.get(details) or {}).items()]
        if entry.get("reference"):
            notes.append(entry["reference"])
        if notes:
            lines.append(f"{'':<24} {' · '.join(notes)}")
    say({word: entries}, lines)


def keys(
    name: Annotated[
        str | None,
        typer.Argument(
            help="a section (optimize) with its keys, or one key (optimize.learning_rate)",
            metavar="[SECTION | KEY]",
            autocompletion=completion.sections_and_keys,
        ),
    ] = None,
) -> None:
    """List all keys of a recipe: type, default, meaning."""
    from quiver.flows import keys as reference

    sections = reference.look_up(name)
    here = reference.name_here(name) if name else None
    if here:
        log.info("%s of TRL, verl or peft is %s in a recipe", printable(name), here)
    say(reference.to_json(sections), reference.lines_of(sections, with_text=name is not None))


def algorithms() -> None:
    """List the algorithms, with defaults and references."""
    from quiver.stages.optimize.algorithms import ALGORITHMS

    keys = (
        "name",
        "description",
        "advantage",
        "surrogate",
        "aggregation",
        "defaults",
    )
    entries = [
        {key: getattr(row, key) for key in keys} | {"reference": row.paper}
        for row in ALGORITHMS.values()
    ]
    _list("algorithms", entries, "defaults")


def rewards() -> None:
    """List reward functions and server dialects. Functions ship with Quiver and are listed with
    their arguments; a dialect is a way to ask a reward server."""
    from quiver.stages.reward.functions import FUNCTIONS
    from quiver.stages.reward.servers.dialects import DIALECTS

    entries = [
        {
            "name": name,
            "kind": "function",
            "description": function.description,
            "arguments": function.arguments,
        }
        for name, function in FUNCTIONS.items()
    ]
    entries += [
        {"name": name, "kind": "server", "description": dialect.description}
        for name, dialect in DIALECTS.items()
    ]
    _list("rewards", entries, "arguments")


def engines() -> None:
    """List the generation engines, with their default options."""
    from quiver.stages.generate.engine import ENGINES

    entries = []
    for name, engine in ENGINES.items():
        options = engine.options().model_dump(mode="json")
        entries.append({"name": name, "description": engine.description, "options": options})
    _list("engines", entries, "options")
