"""Code that a recipe names: `module:function` or `file.py:function`, with the hash of the file that
holds it.

Only a recipe may name code; a path is never taken from data. The hash covers that one file, not
what it imports.

    function, sha256 = load("rewards/mine.py:politeness", "reward.functions[0].use")
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.config import ROOMS
from quiver.stages.common.store import storage

_imported_as: dict[str, str] = {}


def load(name: str, field: str, wanted: type = Callable) -> tuple[Any, str]:
    """The function (or the `wanted`) that `name` points at and the sha256 of its source file.
    ConfigError names `field`."""
    kind = "function" if wanted is Callable else wanted.__name__
    holder, colon, attribute = name.rpartition(":")
    if not colon or not holder or not attribute:
        raise ConfigError(
            f"{field} {printable(repr(name))}",
            f"expected module:{kind} or file.py:{kind}",
            next=f"correct {field}",
        )
    module = _module(holder, field)
    found = getattr(module, attribute, None)
    if not isinstance(found, wanted):
        listed = (
            inspect.isfunction if wanted is Callable else lambda value: isinstance(value, wanted)
        )
        names = [key for key, value in vars(module).items() if listed(value)]
        near = difflib.get_close_matches(attribute, names, 1, 0.5)
        hint = (
            f"; did you mean {near[0]}?"
            if near
            else f"; it has {', '.join(sorted(names)) or f'no {kind}'}"
        )
        raise ConfigError(
            f"{field} {printable(name)}",
            f"{holder} has no {kind} {attribute}{hint}",
            next=f"correct {field}",
        )
    return found, hash_of(module)


def hash_of(module: ModuleType) -> str:
    """sha256 of the module's file; empty where it has none."""
    path = getattr(module, "__file__", None)
    return storage.sha256(Path(path)) if path else ""


def _module(holder: str, field: str) -> ModuleType:
    path = Path(holder).expanduser().absolute()
    if holder.endswith(".py") and not path.is_file():
        raise ConfigError(
            f"{field} {printable(holder)}", f"there is no file {path}", next=f"correct {field}"
        )
    try:
        if holder.endswith(".py"):
            return _from_file(path)
        if os.getcwd() not in sys.path:  # `python -m` puts it there, a console script does not
            sys.path.append(os.getcwd())
        return _imported(_current_name(holder))
    except Exception as error:  # importing runs the user's code, which may raise anything
        what = f"can not be imported: {type(error).__name__}: {printable(error)}"
        command = (
            ["python", holder] if holder.endswith(".py") else ["python", "-c", f"import {holder}"]
        )
        raise ConfigError(f"{field} {printable(holder)}", what, next=shlex.join(command)) from error


def _current_name(name: str) -> str:
    """The name under which module `name` is imported now.

    Older recipes say `deployments.recipes.larger` where it is `quiver.deployments.recipes.larger`
    today. They mean ours, unless a module of exactly that name stands elsewhere.
    """
    room = name.partition(".")[0]
    if room not in ROOMS:
        return name
    spec = PathFinder.find_spec(room)
    folders = list(spec.submodule_search_locations or []) if spec else []
    our_folder = Path(__file__).parents[2] / room
    if not folders or any(Path(folder).resolve() == our_folder.resolve() for folder in folders):
        return f"quiver.{name}"
    try:
        is_theirs = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        is_theirs = False
    return name if is_theirs else f"quiver.{name}"


def _imported(name: str) -> ModuleType:
    """The module as its file is now: a process that lives long must not score with the code of
    yesterday.

    Nor one that starts anew: bytecode that is older than its source is stale, though it names the
    same second and size.
    """
    if name not in sys.modules:
        _forget_stale_bytecode(name)
    module = importlib.import_module(name)
    sha256 = hash_of(module)
    if _imported_as.setdefault(name, sha256) != sha256:
        _imported_as[name] = sha256
        Path(importlib.util.cache_from_source(module.__file__)).unlink(
            missing_ok=True
        )  # it knows whole seconds only
        module = importlib.reload(module)
    return module


def _forget_stale_bytecode(name: str) -> None:
    found = importlib.util.find_spec(name)
    source, cached = (Path(getattr(found, key, None) or os.devnull) for key in ("origin", "cached"))
    if (
        source.is_file()
        and cached.is_file()
        and source.stat().st_mtime_ns > cached.stat().st_mtime_ns
    ):
        cached.unlink()


def _from_file(path: Path) -> ModuleType:
    """A module of its own for each file and content: neither an edited file nor its copy elsewhere
    is mistaken for another."""
    name = f"{path.stem}_{storage.sha256(path)[:12]}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            # compiled here: Python's bytecode cache takes a file of the same size and second for
            # the old one
            exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
