"""User code named in a recipe, `module:function` or `file.py:function`, with a hash of its source.

Only a recipe may name code; a path is never taken from data.

* `module:function` is imported as Python does, with the working directory at the end of `sys.path`.
* The folder of a `file.py` acts as a package, with or without `__init__.py`. The file imports what
  lies beside it by relative name, `from .helper import x`, so helpers of two folders never meet.
  `from ..helper import x`, from above the folder, is refused: it needs `module:function`.
* The hash covers the file and the `.py` files beside it that its import statements name, those that
  these name, and so on, with the folder's `__init__.py`. Other folders are not covered, nor module
  names computed at run time.

    path = locate("rewards/mine.py:politeness", "reward.functions[0].use")     # runs nothing
    fingerprint(path)
    function, sha256 = load("rewards/mine.py:politeness", "reward.functions[0].use")

Not of the spine: to its callers, a plugin is a function and a hash.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.stages.core.files import sha256_of
from quiver.stages.core.threads import parse_python

_loading = threading.RLock()
_hash_when_imported: dict[Path, str] = {}
"""The sha256 of each file when it was last imported."""
_WORD = 0xFFFFFFFF


def load(name: str, field: str, kind: type = Callable) -> tuple[Any, str]:
    """Import the function, or the object of class `kind`, that `name` points at.

    A long-lived process imports it again if the file, or one beside it that it names, has changed.

    Returns:
        The object, and the `fingerprint` of its file.

    Raises:
        ConfigError: about `field`; the object is missing or cannot be imported.
    """
    kind_name = "function" if kind is Callable else kind.__name__
    path = locate(name, field, kind_name)
    holder, _, attribute = name.rpartition(":")
    module_name = holder
    if holder.endswith(".py"):
        # The name says where the file lies, so a pool process that a plugin starts finds it too.
        places = (quote(os.fsencode(place), "/") for place in (path.parent, path.stem))
        module_name = ".".join([_BELOW, *(place.replace(".", "%2E") for place in places)])
    with _loading:
        try:
            _forget_changed(path, module_name)
            module = importlib.import_module(module_name)
        except Exception as error:  # importing runs the user's code, which may raise anything
            raise _not_importable(holder, error, field, path) from error
    plugin = getattr(module, attribute, None)
    if not isinstance(plugin, kind):
        choices = [
            key
            for key, member in vars(module).items()
            if (inspect.isfunction(member) if kind is Callable else isinstance(member, kind))
        ]
        raise _not_there(name, field, kind_name, choices)
    return plugin, fingerprint(path)


def locate(name: str, field: str, kind_name: str = "function") -> Path:
    """Return the source file of `file.py:function` or `module:function`. Runs no user code.

    Raises ConfigError about `field`.
    """
    holder, _, attribute = name.rpartition(":")
    is_file = holder.endswith(".py")
    if not attribute or not (is_file or all(holder.split("."))):
        raise ConfigError(
            f"{field} {printable(repr(name))}",
            f"expected module:{kind_name} or file.py:{kind_name}",
            next=f"correct {field}",
        )
    if os.getcwd() not in sys.path:  # `python -m` adds it, a console script does not
        sys.path.append(os.getcwd())
    if is_file:
        path = Path(os.path.expanduser(holder)).absolute()
        if not path.is_file():
            raise ConfigError(
                f"{field} {printable(holder)}", f"there is no file {path}", next=f"correct {field}"
            )
        return path
    spec = find_spec(holder)
    if spec is None or not spec.has_location:
        error = ModuleNotFoundError(f"No module named {holder!r} with a source file of its own")
        raise _not_importable(holder, error, field)
    return Path(spec.origin).absolute()


def find_spec(name: str) -> ModuleSpec | None:
    """Find the spec of module `name`, without importing its packages as importlib does. Returns
    None if there is none."""
    top, *submodules = name.split(".")
    if not all((top, *submodules)):
        return None
    if top == "quiver":  # our packages may be imported: they hold nothing but docstrings
        with suppress(ModuleNotFoundError):
            return importlib.util.find_spec(name)
        return None
    spec = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    for submodule in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(submodule, list(spec.submodule_search_locations))
    return spec


def definition(
    name: str, field: str, kind_name: str = "function"
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return the `def` that `name` points at, by parsing the file, not running it.

    Returns None if the file defines it in another way, such as a class.

    Raises:
        ConfigError: the file is missing or is not Python, or certainly does not define the name:
            it neither binds the name nor imports or computes names that are not written down.
    """
    path = locate(name, field, kind_name)
    holder, _, attribute = name.rpartition(":")
    try:
        tree = parse_python(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, OSError) as error:
        raise _not_importable(holder, error, field) from None
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound[node.name] = node if node in tree.body else None
        elif isinstance(node, ast.alias):
            bound[(node.asname or node.name).partition(".")[0]] = None
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = None
    computes_names = {"*", "__getattr__"} & bound.keys() or b"globals(" in path.read_bytes()
    if attribute not in bound and not computes_names:
        names = [key for key, node in bound.items() if node is not None]
        raise _not_there(name, field, kind_name, names)
    function = bound.get(attribute)
    is_plain = isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    return function if is_plain and not function.decorator_list else None


def fingerprint(path: Path) -> str:
    """Return the sha256 of the source file `path`, including files beside it that it imports."""
    hashes = {source.name: sha256_of(source) for source in _sources(path)}
    if len(hashes) == 1:
        return hashes[path.name]
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _sources(path: Path) -> list[Path]:
    """Return `path` and the files beside it that import statements name, recursively."""
    sources = [path]
    for source in sources:  # grows on the way
        names = {"__init__"}
        # Importing the file will raise the error.
        with suppress(SyntaxError, ValueError, RecursionError):
            names |= _imported_names(source.read_bytes())
        beside = {source.with_name(f"{name}.py") for name in names}
        sources += [file for file in beside.difference(sources) if file.is_file()]
    return sources


@lru_cache(maxsize=256)
def _imported_names(source: bytes) -> frozenset[str]:
    """Return all names in the import statements of `source`."""
    names: set[str] = set()
    for node in ast.walk(parse_python(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.update(node.module.split("."))
        elif isinstance(node, ast.alias):
            names.update(node.name.split("."))
    return frozenset(names)


def imports_above(path: Path) -> bool:
    """Return True if `path`, or a file beside it that it imports, seems to import from above the
    folder, which `file.py:function` cannot do."""
    return any(_FROM_ABOVE.search(source.read_bytes()) for source in _sources(path))


def _forget_changed(path: Path, module_name: str) -> None:
    """Make all files of the folder be imported again if `path`, or one that it names, has changed.

    Bytecode that may be older than its source is stale, even if it records the same second and
    size. If such bytecode cannot be deleted, this process reads no bytecode from then on.
    """
    hashes = {source: sha256_of(source) for source in _sources(path)}
    is_changed = any(
        _hash_when_imported.get(source, sha256) != sha256 for source, sha256 in hashes.items()
    )
    _hash_when_imported.update(hashes)
    for source in hashes:
        bytecode = Path(importlib.util.cache_from_source(str(source)))
        status = source.stat()
        try:
            if status.st_mtime_ns >= bytecode.stat().st_mtime_ns:
                bytecode.unlink()
        except FileNotFoundError:
            pass
        except OSError:  # in a folder of somebody else
            recorded = struct.pack("<LL", int(status.st_mtime) & _WORD, status.st_size & _WORD)
            with suppress(OSError):
                if bytecode.read_bytes()[8:16] == recorded:  # Python would trust it
                    sys.pycache_prefix = os.devnull
    if is_changed:
        paths = {str(source) for source in _hash_when_imported if source.parent == path.parent}
        stale = {
            name
            for name, module in sys.modules.items()
            # not by getattr, which can make a module import or raise
            if getattr(module, "__dict__", {}).get("__file__") in paths
        }
        stale.add(module_name.rpartition(".")[0])  # the package object keeps its old modules
        below = tuple(f"{name}." for name in stale)
        for name in [*sys.modules]:
            if name in stale or name.startswith(below):
                del sys.modules[name]


def _not_there(name: str, field: str, kind_name: str, choices: list[str]) -> ConfigError:
    holder, _, attribute = name.rpartition(":")
    listed = f"; it has {', '.join(sorted(choices)) or f'no {kind_name}'}"
    return ConfigError(
        f"{field} {printable(name)}",
        f"{holder} has no {kind_name} {attribute}{did_you_mean(attribute, choices, listed)}",
        next=f"correct {field}",
    )


def _not_importable(
    holder: str, error: Exception, field: str, path: Path | None = None
) -> ConfigError:
    command = ["python", holder] if holder.endswith(".py") else ["python", "-c", f"import {holder}"]
    next_step = shlex.join(command)
    missing = getattr(error, "name", None)
    if isinstance(missing, str) and _ABOVE in missing.split("."):
        next_step = "name it by its module: package.module:function"
    elif path and missing and path.with_name(f"{missing}.py").is_file():
        next_step = f"import the file beside it by relative name: from .{missing} import …"
    return ConfigError(
        f"{field} {printable(holder)}",
        f"cannot be imported: {type(error).__name__}: {printable(error)}",
        next=next_step,
    )


# -- folders as packages

__path__: list[str] = []
"""Makes this module act as a package; `_Folders` alone finds the packages below it."""
_ABOVE = "^"
_BELOW = ".".join([__name__, *[_ABOVE] * 8])
"""The package of all folders. An import from above a folder ends at one of these empty packages,
and never at modules of ours."""
_FROM_ABOVE = re.compile(rb"^\s*from\s*\.\.", re.MULTILINE)


class _Folders:
    """Finds the package that a folder is, and a file in it, whose name may have dots."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{__name__}."):
            return None
        if f"{_BELOW}.".startswith(f"{name}."):
            return ModuleSpec(name, None, is_package=True)
        if not name.startswith(f"{_BELOW}./"):  # folders have their whole path
            raise ImportError("a file cannot import from above its folder", name=name)
        places = name.removeprefix(f"{_BELOW}.").partition(".")
        folder, _, stem = (os.fsdecode(unquote_to_bytes(place)) for place in places)
        file = Path(folder, f"{stem or '__init__'}.py")
        locations = None if stem else [folder]
        if file.is_file():
            return importlib.util.spec_from_file_location(
                name, file, submodule_search_locations=locations
            )
        if stem:  # a folder below, say
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = locations
        return spec


sys.meta_path.insert(0, _Folders)
