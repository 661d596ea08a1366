"""Functions of a notebook or script as files, which a recipe and the processes of a stage can name.

    as_file(score)      # ~/.cache/quiver/functions/5e0b…/score.py:score

The file holds the function's source and what it uses: imports, other functions of the notebook, and
plain constants. Its name holds the hash of this text. Not of the spine.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.files import write_bytes

_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


def as_file(function: Callable[..., Any]) -> str:
    """Return `file.py:function` for a function; one that an importable file defines stays there.

    Raises ConfigError if it has no source, or uses something that a file cannot hold.
    """
    name = getattr(function, "__name__", "")
    if not isinstance(function, types.FunctionType) or name == "<lambda>":
        raise ConfigError(
            f"function {printable(function)}",
            "expected a function that def defines",
            next="write it as a def in the cell: def score(completions, **columns)",
        )
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    if path and function.__module__ != "__main__" and function.__qualname__ == name:
        return f"{path}:{name}"
    definitions: dict[str, str] = {}
    _define(function, definitions)
    text = "\n\n".join(definitions.values())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "quiver" / "functions" / hashlib.sha256(text.encode()).hexdigest()
    file = folder / f"{name}.py"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(file, text.encode())
    return f"{file}:{name}"


def _define(function: types.FunctionType, definitions: dict[str, str]) -> None:
    """Add the source of a function to `definitions`, after what it uses, by name."""
    definitions[function.__name__] = ""  # it may call itself
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    for name in (*function.__code__.co_freevars, *_globals_in(function.__code__)):
        if name not in known or name in definitions:
            continue
        used = known[name]
        origin = getattr(used, "__module__", None)
        if isinstance(used, types.ModuleType):
            definitions[name] = f"import {used.__name__} as {name}"
        elif isinstance(used, types.FunctionType) and origin == function.__module__:
            _define(used, definitions)
        elif origin not in (None, function.__module__) and hasattr(used, "__name__"):
            definitions[name] = f"from {origin} import {used.__name__} as {name}"
        elif isinstance(used, _PLAIN):
            definitions[name] = f"{name} = {used!r}"
        else:
            raise ConfigError(
                f"function {function.__name__}",
                f"uses {printable(name)}, a {type(used).__name__}, which a file cannot hold",
                next="make it inside the function, or write the function into a file",
            )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise ConfigError(
            f"function {function.__name__}",
            "its source cannot be read",
            next="write it into a file, and name it: my_rewards.py:score",
        ) from None
    definitions.pop(function.__name__)  # after what it uses
    definitions[function.__name__] = source


def _globals_in(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that a function's code, and code inside it, reads."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals_in(inner)
