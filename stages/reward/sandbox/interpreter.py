"""What a Python interpreter consists of: its executable, and the paths that a sandbox has to show
for it to run."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import sysconfig
from functools import lru_cache
from typing import NamedTuple

from quiver.schemas.errors import ConfigError, printable

_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_ASK = """
import json, sys, sysconfig
paths = [sys.prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
print(json.dumps([paths, sysconfig.get_config_var("LIBDIR")]))
"""


class Interpreter(NamedTuple):
    """`command` starts it, with Python code for it to follow; `paths` are those that it reads."""

    command: tuple[str, ...]
    paths: tuple[str, ...]


@lru_cache(maxsize=8)
def find(python: str = "") -> Interpreter:
    """This interpreter with the standard library alone, or `python` with all that is installed in
    its environment."""
    if not python:
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        base = {
            "base": sys.base_prefix,
            "platbase": sys.base_exec_prefix,
        }  # not of a virtual environment around it
        names = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
        return Interpreter(
            (executable, "-S"), _shown([*names, executable], sysconfig.get_config_var("LIBDIR"))
        )
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, check=True, timeout=60
        )
        names, libraries = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"interpreter {printable(python)}",
            f"can not be used for programs: {type(error).__name__}: {printable(error)}",
            next="name the path of an interpreter (sandbox_python of the function code)",
        ) from error
    return Interpreter(
        (os.path.abspath(python),), _shown([*names, *_links(os.path.abspath(python))], libraries)
    )


def _links(path: str) -> list[str]:
    """`path`, what it links to, what that links to, and so on: a virtual environment's python is
    such a chain."""
    found = [path]
    while os.path.islink(found[-1]) and len(found) < 40:
        found.append(
            os.path.normpath(os.path.join(os.path.dirname(found[-1]), os.readlink(found[-1])))
        )
    return found


def _shown(names: list[str], libraries: str | None) -> tuple[str, ...]:
    """`names`, the interpreter's shared library, and the system's libraries; links beside what they
    point at."""
    own = glob.glob(os.path.join(libraries, "libpython3*.so*")) if libraries else []
    found = {
        path
        for name in (*names, *own, *_SYSTEM)
        for path in (name, os.path.realpath(name))
        if os.path.exists(path)
    }
    return tuple(sorted(found))
