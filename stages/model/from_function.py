"""A base model that a user's function makes: `module:function` or `file.py:function` as its name.

The function is called once per run, as `function(folder, **arguments)` with a `pathlib.Path`, and
writes a model directory there. Its file and arguments identify the model, so the store finds it
before anything is called again. The file runs only where the model is made. An error of the
function becomes a ConfigError that names it.

    if is_function(name):
        key = source_hash(name, {"seed": 0})    # runs nothing
        function, key = load(name, {"seed": 0})
        make(name, function, {"seed": 0}, folder)

Not of the spine: most recipes name an existing model.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.schemas.manifest import digest
from quiver.stages.core import plugins

_FUNCTION = re.compile(r"(?!package:).+:[A-Za-z_]\w*")
_FIELD = "policy.model"


def is_function(name: str) -> bool:
    """True if `name` is the dotted path of a function and no directory has exactly this name."""
    return bool(_FUNCTION.fullmatch(name)) and not Path(os.path.expanduser(name)).is_dir()


def source_hash(name: str, arguments: dict[str, Any]) -> str:
    """Return the sha256 of the function's name, its file's bytes and the arguments (plain JSON).

    Runs no user code. Raises ConfigError, and ValueError for infinity and NaN, which JSON does not
    have; recipes refuse them.
    """
    return _digest(name, plugins.fingerprint(plugins.locate(name, _FIELD)), arguments)


def load(name: str, arguments: dict[str, Any]) -> tuple[Callable[..., None], str]:
    """Return the function, and the `source_hash` of the file it came from. Raises ConfigError."""
    function, sha256 = plugins.load(name, _FIELD)
    return function, _digest(name, sha256, arguments)


def _digest(name: str, sha256: str, arguments: dict[str, Any]) -> str:
    plain_arguments = to_jsonable_python(arguments)  # a date is its text, as stages are given it
    return digest([name.rpartition(":")[2], sha256, plain_arguments])


def make(name: str, function: Callable[..., None], arguments: dict[str, Any], folder: Path) -> None:
    """Call the function to write the model into `folder`.

    Raises ConfigError with the function's error. Running out of disk or memory is not its fault;
    those errors pass unchanged.
    """
    try:
        function(folder, **arguments)
    except (QuiverError, MemoryError):
        raise
    except Exception as error:  # the user's code may raise anything
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"{_FIELD} {printable(name)}",
            f"raised {type(error).__name__}: {printable(error)}",
            next="correct the function, or policy.arguments",
        ) from error
