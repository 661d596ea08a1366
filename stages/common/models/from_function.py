"""A base model that a function of the user's makes: `module:function` or `file.py:function` in
place of a model's name.

The function is called once a run, as `function(folder, **arguments)` with a `pathlib.Path`, and
writes a model directory there. Its file and the arguments say which model is meant, so it is found
in the store before anything is called again. The file runs where the model is made, and nowhere
else. Whatever the function raises is a ConfigError that names it.

    if is_function(name):
        key = source_hash(name, {"seed": 0})    # runs nothing
        function, key = load(name, {"seed": 0})
        make(name, function, {"seed": 0}, folder)

Not of the spine: most recipes name a model that is there already.
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
from quiver.stages.common import plugins

_FUNCTION = re.compile(r"(?!package:).+:[A-Za-z_]\w*")
_FIELD = "policy.model"


def is_function(name: str) -> bool:
    """Whether `name` is the dotted path of a function. A directory that bears this very name goes
    first."""
    return bool(_FUNCTION.fullmatch(name)) and not Path(os.path.expanduser(name)).is_dir()


def source_hash(name: str, arguments: dict[str, Any]) -> str:
    """sha256 of the function's name, the bytes of its file and the arguments (plain JSON). No code
    of a user's runs. ConfigError."""
    return _digest(name, plugins.fingerprint(plugins.locate(name, _FIELD)), arguments)


def load(name: str, arguments: dict[str, Any]) -> tuple[Callable[..., None], str]:
    """The function, and the `source_hash` of the file that it was loaded from. ConfigError."""
    function, sha256 = plugins.load(name, _FIELD)
    return function, _digest(name, sha256, arguments)


def _digest(name: str, sha256: str, arguments: dict[str, Any]) -> str:
    plain_arguments = to_jsonable_python(arguments, inf_nan_mode="null")
    return digest([name.rpartition(":")[2], sha256, plain_arguments])


def make(name: str, function: Callable[..., None], arguments: dict[str, Any], folder: Path) -> None:
    """Call the function. ConfigError with what it raised; a full disk or memory is not its fault
    and rises as it is."""
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
