"""Finds a Python interpreter for the sandbox: its command, and the paths it must be shown."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
import sysconfig
from functools import cache
from typing import NamedTuple

from quiver.schemas.errors import ConfigError, printable

_SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_ASK = """
import json, sys, sysconfig
paths = [sys.prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
print(json.dumps([paths, sysconfig.get_config_var("LIBDIR")]))
"""


class Interpreter(NamedTuple):
    """A Python interpreter: its command, to be followed by Python code, and the paths it reads."""

    command: tuple[str, ...]
    paths: tuple[str, ...]


@cache
def find(python: str = "") -> Interpreter:
    """Return the interpreter to run programs with.

    Args:
        python: Path of an interpreter, which is used with all packages installed in its
            environment. Default: this interpreter, with the standard library alone.

    Raises:
        ConfigError: `python` cannot be run.
    """
    if not python:
        executable = os.path.realpath(sys._base_executable)
        # the base installation, not the virtual environment that Quiver runs in
        base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
        paths = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
        shown = _shown([*paths, executable], sysconfig.get_config_var("LIBDIR"))
        return Interpreter((executable, "-S"), shown)
    try:
        answer = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        paths, library_folder = json.loads(answer)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"interpreter {printable(python)}",
            f"cannot be used for programs: {type(error).__name__}: {printable(error)}",
            next="name the path of an interpreter (sandbox_python of the function code)",
        ) from error
    executable = os.path.abspath(python)
    # a virtual environment's python is a link, possibly to another link; each must be visible
    links = [executable]
    while os.path.islink(links[-1]) and len(links) < 40:
        folder = os.path.dirname(links[-1])
        links.append(os.path.normpath(os.path.join(folder, os.readlink(links[-1]))))
    return Interpreter((executable,), _shown([*paths, *links], library_folder))


def _shown(paths: list[str], library_folder: str | None) -> tuple[str, ...]:
    """Return the existing paths among `paths`, the interpreter's shared library and the system
    libraries; each link comes with its target."""
    libraries = glob.glob(os.path.join(library_folder, "libpython3*.so*")) if library_folder else []
    shown = set()
    for path in (*paths, *libraries, *_SYSTEM):
        shown.update(filter(os.path.exists, (path, os.path.realpath(path))))
    return tuple(shown)
