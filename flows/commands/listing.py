"""Commands that list what there is: algorithms, rewards, engines."""

from __future__ import annotations

from typing import Any

from .shared import Debug, Json, say


def _list(word: str, entries: list[dict[str, Any]], details: str, as_json: bool) -> None:
    """`entries`, one a line; below it what stands under the key `details` of one, and its
    reference."""
    lines = []
    for entry in entries:
        lines.append(f"{entry['name']:<24} {entry['description']}")
        below = [f"{key}: {value}" for key, value in (entry.get(details) or {}).items()]
        below += [entry["reference"]] if entry.get("reference") else []
        lines += [f"{'':<24} {' · '.join(below)}"] if below else []
    say(as_json, {word: entries}, lines)


def algorithms(json: Json = False, debug: Debug = False) -> None:
    """The algorithms, with defaults and references."""
    from quiver.stages.optimize.algorithms import ALGORITHMS

    shown = (
        "name",
        "description",
        "advantage",
        "surrogate",
        "aggregation",
        "defaults",
        "reference",
    )
    _list(
        "algorithms",
        [{key: getattr(row, key) for key in shown} for row in ALGORITHMS.values()],
        "defaults",
        json,
    )


def rewards(json: Json = False, debug: Debug = False) -> None:
    """What can score: functions that come with Quiver, with their arguments, and the dialects in
    which servers are asked."""
    from quiver.stages.reward.functions import FUNCTIONS
    from quiver.stages.reward.servers.dialects import DIALECTS

    shipped = [
        {
            "name": name,
            "kind": "function",
            "description": found.description,
            "arguments": found.arguments,
        }
        for name, found in FUNCTIONS.items()
    ]
    spoken = [
        {"name": name, "kind": "server", "description": found.description}
        for name, found in DIALECTS.items()
    ]
    _list("rewards", [*shipped, *spoken], "arguments", json)


def engines(json: Json = False, debug: Debug = False) -> None:
    """The generation engines, with the defaults of their options."""
    from quiver.stages.generate.engine import ENGINES

    shipped = ENGINES.items()
    defaults = {name: entry.options().model_dump(mode="json") for name, entry in shipped}
    _list(
        "engines",
        [{"name": n, "description": e.description, "options": defaults[n]} for n, e in shipped],
        "options",
        json,
    )
