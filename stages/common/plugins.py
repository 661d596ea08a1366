"""User code named in a recipe, `module:function` or `file.py:function`, with a hash of its source.

Only a recipe may name code; a path is never taken from data. The hash covers the file and the files
of its own folder that its import statements name (`import helper`, `from .helper import x`, `from
package.helper import x`), the files that these import, and so on, with the folder's `__init__.py`.
It does not cover other folders, installed packages, or module names computed at run time.

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
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.stages.common.store import storage
from quiver.stages.common.threads import parse_python

_OUR_FOLDERS = [
    Path(__file__).resolve().parents[2] / room
    for room in ("schemas", "stages", "flows", "deployments")
]
_INSTALLED = {"site-packages", "dist-packages"}
_loading = threading.RLock()
_hash_when_imported: dict[Path, str] = {}
"""The `fingerprint` of each file when it was last imported."""


def load(name: str, field: str, kind: type = Callable) -> tuple[Any, str]:
    """Import the function, or the object of class `kind`, that `name` points at.

    Returns:
        The object, and the `fingerprint` of its file.

    Raises:
        ConfigError: about `field`; the object is missing or cannot be imported.
    """
    kind_name = "function" if kind is Callable else kind.__name__
    path = locate(name, field, kind_name)
    holder, _, attribute = name.rpartition(":")
    with _loading, _among_neighbours(path):
        try:
            _forget_changed(path)
            module_name = _module_name(path) if holder.endswith(".py") else holder
            _finder.files[module_name] = path
            module = importlib.import_module(module_name)
        except Exception as error:  # importing runs the user's code, which may raise anything
            raise _not_importable(holder, error, field) from error
    plugin = getattr(module, attribute, None)
    if not isinstance(plugin, kind):
        choices = [
            key
            for key, member in vars(module).items()
            if (inspect.isfunction(member) if kind is Callable else isinstance(member, kind))
        ]
        raise _not_there(name, field, kind_name, choices)
    return plugin, fingerprint(Path(module.__file__))


def locate(name: str, field: str, kind_name: str = "function") -> Path:
    """Return the source file of `file.py:function` or `module:function`. Runs no user code.

    Raises ConfigError about `field`.
    """
    holder, _, attribute = name.rpartition(":")
    is_name = holder.endswith(".py") or all(holder.split("."))
    if not is_name or not attribute:
        raise ConfigError(
            f"{field} {printable(repr(name))}",
            f"expected module:{kind_name} or file.py:{kind_name}",
            next=f"correct {field}",
        )
    if os.getcwd() not in sys.path:  # `python -m` adds it, a console script does not
        sys.path.append(os.getcwd())
    if holder.endswith(".py"):
        path = Path(os.path.expanduser(holder)).absolute()
        if not path.is_file():
            raise ConfigError(
                f"{field} {printable(holder)}", f"there is no file {path}", next=f"correct {field}"
            )
        return path
    spec = _find_spec(holder)
    if spec is not None and not spec.has_location and spec.loader is not None:
        raise ConfigError(
            f"{field} {printable(name)}",
            f"{holder} is a part of Python itself, with no source file to keep the hash of",
            next=f"write a {kind_name} of your own that calls it, and name that",
        )
    if spec is None or not spec.has_location:
        raise _not_importable(holder, ModuleNotFoundError(f"No module named {holder!r}"), field)
    return Path(spec.origin).absolute()


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
    in_package = (path.parent / "__init__.py").is_file() or not holder.endswith(".py")
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.level and not in_package:
            names = ", ".join(alias.name for alias in node.names)
            absolute = f"from {node.module} import {names}" if node.module else f"import {names}"
            raise ConfigError(
                f"{field} {printable(holder)}",
                f"its line {node.lineno} is a relative import, and it lies in no package: there is "
                "no __init__.py beside it",
                next=f"write there {absolute}",
            )
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
    hashes = _hashes(path)
    if len(hashes) == 1:
        return hashes[path]
    names = {source.name: sha256 for source, sha256 in hashes.items()}
    return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()


# -- finding a module


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the spec of module `name`, without importing its packages as importlib does."""
    top, *submodules = name.split(".")
    if top == "quiver":  # our packages may be imported: they hold nothing but docstrings
        with suppress(ModuleNotFoundError):
            return importlib.util.find_spec(name)
        return None
    finders = [finder for finder in sys.meta_path if finder is not _finder]
    spec = next(filter(None, (finder.find_spec(top, None) for finder in finders)), None)
    for submodule in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(submodule, list(spec.submodule_search_locations))
    return spec


def _places(spec: ModuleSpec) -> list[str]:
    return [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])


def _is_ours(path: Path) -> bool:
    return any(path.resolve().is_relative_to(folder) for folder in _OUR_FOLDERS)


# -- imports of a file


def _hashes(path: Path) -> dict[Path, str]:
    """Return the sha256 of `path` and of the files beside it that it imports, recursively."""
    sources = [path]
    for source in sources:  # grows on the way
        beside = {source.with_name(f"{name}.py") for name in _imported(source)}
        sources += [file for file in beside.difference(sources) if file.is_file()]
    return {source: storage.sha256(source) for source in sources}


def _imported(path: Path) -> Iterator[str]:
    """Yield names in the import statements of `path`; each may be a file beside it."""
    if path.suffix != ".py" or _is_library(path):
        return
    try:
        tree = parse_python(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # importing it will raise the error
        return
    yield "__init__"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            level = getattr(node, "level", 0)
            outer = (getattr(node, "module", "") or "").split(".")
            base = path.parents[min(max(level, 1), len(path.parents)) - 1]
            is_below = base.joinpath(*outer).is_relative_to(path.parent)
            for alias in node.names:
                names = [*outer, *alias.name.split(".")]
                top = next(filter(None, names))
                if is_below and (level or top not in sys.stdlib_module_names):
                    yield from filter(None, names)


def _is_library(path: Path) -> bool:
    return _is_ours(path) or bool(_INSTALLED & set(path.parts))


def _project(path: Path) -> Path:
    """Return the folder from which the packages that contain `path` are imported."""
    project = path.parent
    while (project / "__init__.py").is_file():
        project = project.parent
    return project


# -- importing


_DOT = "%2e"
"""A dot of a file's name within a module's name, where a dot would mean a package."""


def _module_name(path: Path) -> str:
    """Return a module name below this module, which acts as a package.

    So a process that a plugin starts can import the file too.
    """
    place = hashlib.sha256(bytes(path)).hexdigest()[:8]
    stem = path.stem.replace(".", _DOT)
    return f"{__name__}.{stem}_{storage.sha256(path)[:12]}_{place}"


__path__: list[str] = []
"""Makes this module act as a package; _Finder alone finds the modules below it."""


class _FileLoader(SourceFileLoader):
    """Runs a file as a separate module for each content.

    So an edited file, or a copy elsewhere, is never mistaken for another. It compiles the source
    itself, because Python's bytecode cache mistakes a file of the same size and second for the old
    one.
    """

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.get_data(self.path), self.path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        path = Path(self.path)
        # in a package it may use relative imports
        name = ".".join([*path.parent.relative_to(_project(path)).parts, path.stem])
        module.__spec__ = importlib.util.spec_from_file_location(name, path)
        module.__package__ = module.__spec__.parent
        with _loading, _among_neighbours(path):
            super().exec_module(module)


def _forget_changed(path: Path) -> None:
    """Make `path` and its neighbours be imported again if one of them has changed.

    A long-lived process must not score with outdated code. Bytecode older than its source is stale,
    even if it records the same second and size.
    """
    hashes = {source: fingerprint(source) for source in _hashes(path)}
    changed = any(
        _hash_when_imported.get(source, sha256) != sha256 for source, sha256 in hashes.items()
    )
    _hash_when_imported.update(hashes)
    for source in hashes:
        bytecode = Path(importlib.util.cache_from_source(str(source)))
        with suppress(FileNotFoundError):
            if changed or source.stat().st_mtime_ns > bytecode.stat().st_mtime_ns:
                bytecode.unlink()
    if changed:
        paths = set(map(str, hashes))
        _forget(
            name
            for name, module in sys.modules.items()
            # not by getattr, which can make a module import or raise
            if getattr(module, "__dict__", {}).get("__file__") in paths
        )


def _forget(names: Iterable[str]) -> None:
    names = set(names)
    # a package's modules would stay in the old package object
    below = tuple(f"{name}." for name in names)
    for name in list(sys.modules):
        if name in names or name.startswith(below):
            del sys.modules[name]


def _not_there(name: str, field: str, kind_name: str, choices: list[str]) -> ConfigError:
    holder, _, attribute = name.rpartition(":")
    listed = f"; it has {', '.join(sorted(choices)) or f'no {kind_name}'}"
    return ConfigError(
        f"{field} {printable(name)}",
        f"{holder} has no {kind_name} {attribute}{did_you_mean(attribute, choices, listed)}",
        next=f"correct {field}",
    )


def _not_importable(holder: str, error: Exception, field: str) -> ConfigError:
    command = ["python", holder] if holder.endswith(".py") else ["python", "-c", f"import {holder}"]
    return ConfigError(
        f"{field} {printable(holder)}",
        f"cannot be imported: {type(error).__name__}: {printable(error)}",
        next=shlex.join(command),
    )


class _Finder:
    """Finds modules for files that a recipe names, by their `_module_name`.

    It also works in a pool process started by `spawn` or `forkserver`: such a process unpickles a
    function by its module's name, and inherits the `sys.path` of its parent.

    It finds modules beside such a file too, then those of its project, before installed ones, as
    Python does for a script. The standard library comes first, and an installed package comes
    before a folder that holds no module.
    """

    files: ClassVar[dict[str, Path]] = {}
    """Files that this process loaded, by module name."""
    folders: tuple[str, ...] = ()
    """Folders of these files, also at the end of `sys.path` for processes that a plugin starts."""
    on_path: frozenset[str] = frozenset()
    """Folders that this finder added to `sys.path`."""
    names: frozenset[str] = frozenset()
    """Names of the modules found in these folders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.startswith(f"{__name__}."):
            stem = name.removeprefix(f"{__name__}.").rsplit("_", 2)[0].replace(_DOT, ".")
            below = (Path(folder, f"{stem}.py").absolute() for folder in dict.fromkeys(sys.path))
            for file in filter(None, (self.files.get(name), *below)):
                if file.is_file() and _module_name(file) == name:
                    loader = _FileLoader(name, str(file))
                    return importlib.util.spec_from_file_location(name, file, loader=loader)
            raise ModuleNotFoundError(
                f"no folder of sys.path has the {stem}.py that another process loaded: it was "
                "changed or taken away meanwhile",
                name=name,
            )
        if path is not None or name in sys.stdlib_module_names:
            return None
        spec = PathFinder.find_spec(name, list(self.folders))
        if spec is None or not (spec.has_location or PathFinder.find_spec(name) is None):
            return None
        self.names |= {name}
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)


@contextmanager
def _among_neighbours(path: Path) -> Iterator[None]:
    """Let imports find the neighbours of `path`, inside the block no other file's.

    After the block, neighbours of `path` and of earlier files are found, since a function may
    import when it is called.
    """
    earlier = _finder.folders
    _finder.folders = () if _is_library(path) else (str(path.parent), str(_project(path)))
    sys.path[:] = [entry for entry in sys.path if entry not in _finder.on_path]
    if not set(_finder.folders) >= set(earlier):
        _forget(  # another file's neighbour of the same name
            name
            for name in _finder.names & sys.modules.keys()
            if (spec := _finder.find_spec(name)) is None
            or _places(spec) != _places(sys.modules[name].__spec__)
        )
    try:
        yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry not in _finder.on_path]
        _finder.folders = tuple(dict.fromkeys([*_finder.folders, *earlier]))
        _finder.on_path = frozenset(_finder.folders) - frozenset(sys.path)
        sys.path += [folder for folder in _finder.folders if folder in _finder.on_path]
