"""The reference of all recipe keys, made from the docstrings of their fields.

Look here if `quiver keys` shows something odd. The command prints it, and the document is written
by

    python -m quiver.flows.keys > deployments/docs/keys.md

No torch, vLLM or Prefect is imported for it.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from quiver.schemas.errors import ConfigError, printable
from quiver.stages import MODULES
from quiver.stages.core.config import Key, descriptions, keys_of
from quiver.stages.core.names_elsewhere import IN_SECTIONS, KEYS
from quiver.stages.core.run.stage import load_stage
from quiver.stages.generate.engine import ENGINES

from .recipe import Recipe

OVERLAYS = {"data.held_out": "data", "evaluate.generate": "generate"}
"""Tables that hold the keys of another section with other values, for evaluation."""
_OPTIONS = "generate.options"
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", Any: "anything"}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HEAD = """# Keys of a recipe

Every key that a recipe may have, by section. `quiver keys` prints the same, and
`quiver keys optimize.learning_rate` one of them. This page is written by `make keys` from the
docstrings in the code: change it there.

**run_key**: "yes": another value makes other versions; a path, a function or a model counts by its
bytes. "no": it decides only where, when or how fast the work runs, or which versions a stage is
given.
"""


@dataclass(frozen=True)
class KeyEntry:
    """The description of one key."""

    name: str
    """`optimize.learning_rate`; a key in a list of tables is `reward.functions.use`."""
    section: str
    """Heading in the recipe: `[optimize]`, `[[reward.functions]]`; empty at the top."""
    type: str
    default: str | None
    """Default, written as in TOML. None: the key must be set if its section is present."""
    run_key: Literal["yes", "no"]
    description: str


@dataclass(frozen=True)
class Section:
    """A section of a recipe with its own keys, without the keys of sections below it."""

    name: str
    heading: str
    description: str
    keys: list[KeyEntry]


@cache
def sections() -> tuple[Section, ...]:
    """Return all sections, in the order of a recipe; a section comes before the sections below
    it."""
    by_name = {"": Section("", "", "Above the first section.", [])}
    for key in keys_of(Recipe):
        if key.section is None:
            section = by_name[key.path.rpartition(".")[0]]
            section.keys.append(_entry(key, section.heading))
            continue
        is_list = get_origin(key.field.annotation) is tuple
        heading = f"[[{key.path}]]" if is_list else f"[{key.path}]"
        by_name[key.path] = Section(key.path, heading, inspect.cleandoc(key.section.__doc__), [])
    ordered = [*by_name.values()]
    place = [*by_name].index("reward")
    ordered[place:place] = [
        Section(
            _OPTIONS,
            f"[{_OPTIONS}]",
            inspect.cleandoc(engine.options.__doc__),
            [_entry(key, f"[{_OPTIONS}]") for key in keys_of(engine.options, f"{_OPTIONS}.")],
        )
        for engine in ENGINES.values()
    ]
    return tuple(ordered)


def _entry(key: Key, heading: str) -> KeyEntry:
    default = None
    if not key.field.is_required():
        plain = key.field.get_default(call_default_factory=True)
        default = "not set" if plain is None else json.dumps(plain, ensure_ascii=False)
    top, _, below = key.path.partition(".")
    decides = key.path == "seed" or key.path in OVERLAYS
    stage = "prompt" if top == "data" else top
    if stage in MODULES:  # the keys of a section enter the config of its stage
        decides |= below.partition(".")[0] in load_stage(stage).Config.model_fields
    return KeyEntry(
        name=key.path,
        section=heading,
        type=type_words(key.field.annotation, key.field.metadata),
        default=default,
        run_key="yes" if decides and not key.is_runtime else "no",
        description=descriptions(key.owner)[key.path.rpartition(".")[2]],
    )


def type_words(annotation: Any, metadata: Any = ()) -> str:
    """Return a type in words for a recipe's reader, with its bounds.

    >>> type_words(tuple[int, ...] | None), type_words(Literal["a", "b"])
    ('list of integer', '"a" or "b"')
    """
    bounds = [
        f"{sign} {getattr(bound, name):g}"
        for bound in metadata
        for name, sign in _SIGNS.items()
        if hasattr(bound, name)
    ]
    members = [member for member in get_args(annotation) if member not in (type(None), ...)]
    origin = get_origin(annotation)
    if origin is Annotated:
        words = type_words(members[0], members[1:])
    elif origin is Literal:
        words = " or ".join(json.dumps(member) for member in members)
    elif origin in (Union, types.UnionType):
        words = " or ".join(map(type_words, members))
    elif origin in (tuple, list):
        is_pair = origin is tuple and ... not in get_args(annotation)
        inner = [type_words(member) for member in members]
        words = f"[{', '.join(inner)}]" if is_pair else f"list of {inner[0]}"
    elif origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        words = "table"
    else:
        words = _WORDS[annotation]
    return " ".join([words, *bounds])


def look_up(name: str | None) -> list[Section]:
    """Return the sections that match `name`, each with its matching keys.

    `name` may be None (all), a section, a key's path or the end of it, or a key's name in TRL, verl
    or peft. Raises ConfigError that names the nearest key, and the sections.
    """
    if name is None:
        return list(sections())
    path = re.sub(r"\[\d*\]|\.\d+(?=\.|$)", "", name.strip("[]"))
    for overlay, base in OVERLAYS.items():
        if path.startswith(f"{overlay}."):
            path = base + path.removeprefix(overlay)
    matches = _matches(name_here(path) or path)
    if matches:
        return matches
    names = [section.name for section in sections() if section.name]
    paths = [key.name for section in sections() for key in section.keys]
    paths += names
    by_name = {key_path.rpartition(".")[2]: key_path for key_path in reversed(paths)}
    by_name |= {key_path: key_path for key_path in paths}
    near = [by_name[close] for close in difflib.get_close_matches(path, by_name, 1, 0.5)]
    meant = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(known_name for known_name in names if "." not in known_name)
    raise ConfigError(
        f"key {printable(name)}",
        f"no recipe has such a key or section (sections: {listed}){meant}",
        next=f"quiver keys {near[0]}" if near else "quiver keys",
    )


def name_here(path: str) -> str | None:
    """Return our key for a name of TRL, verl or peft, such as `actor.optim.lr`.

    None if the name is unknown, or is a key of ours.
    """
    if _matches(path):
        return None
    for ending, key in IN_SECTIONS.items():
        if f".{path}".endswith(f".{ending}"):
            return key
    return KEYS.get(path.rpartition(".")[2])


def _matches(path: str) -> list[Section]:
    """Return the sections with the keys that match `path`.

    A section or key with exactly this path comes first, with everything below it. If there is none,
    every section or key whose path contains these names in a row matches.
    """
    ways: tuple[Callable[[str], bool], ...] = (
        lambda name: f"{name}.".startswith(f"{path}."),
        lambda name: f".{path}." in f".{name}.",
    )
    for is_meant in ways:
        matches = [
            replace(section, keys=[key for key in section.keys if is_meant(key.name)])
            for section in sections()
        ]
        matches = [
            section
            for section in matches
            if section.keys or (section.name and is_meant(section.name))
        ]
        if matches:
            return matches
    return []


def lines_of(found_sections: list[Section], *, with_text: bool) -> list[str]:
    """Return lines for a terminal: one per key, and its meaning below.

    The meaning is the first sentence, or the whole text if `with_text` is true.
    """
    lines: list[str] = []
    for section in found_sections:
        lines += ["", section.heading or "(at the top)"]
        width = max((len(key.name) for key in section.keys), default=0)
        for key in section.keys:
            default = "must be set" if key.default is None else f"default {key.default}"
            run_key = " · not in the run_key" if key.run_key == "no" else ""
            lines.append(f"  {key.name:<{width}}  {key.type} · {default}{run_key}")
            text = key.description
            if not with_text:
                text = re.split(r"(?<=\.)\s", " ".join(text.split()), maxsplit=1)[0]
            lines += [f"      {line}" for line in text.splitlines()]
    return lines[1:]


def to_json(found_sections: list[Section]) -> dict[str, Any]:
    """Return the object that `quiver keys --json` prints."""
    return {"keys": [asdict(key) for section in found_sections for key in section.keys]}


def markdown() -> str:
    """Return the document `deployments/docs/keys.md`."""
    blocks = [_HEAD]
    for section in sections():
        title = f"`{section.heading}`" if section.heading else "At the top"
        blocks.append(f"## {title}\n{section.description}\n")
        if section.keys:
            rows = ["| key | type | default | run_key | meaning |", "|---|---|---|---|---|"]
            for key in section.keys:
                default = "must be set" if key.default is None else key.default
                meaning = " ".join(key.description.split())
                cells = (key.name, key.type, default, key.run_key, meaning)
                rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            blocks.append("\n".join(rows) + "\n")
    return "\n".join(blocks)


if __name__ == "__main__":
    print(markdown(), end="")
