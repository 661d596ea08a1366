"""Make every path of a recipe absolute when it is handed in, and refuse paths that another host
could not see. Look here if a deployed recipe names a missing file.

A worker runs in another folder, perhaps on another host or in a container. So relative paths are
taken from the folder of the command, and files that must exist are checked at once. Values that are
no paths of this host stay as they are: hub ids, `package:…`, `datasets:NAME`, Quiver's own
functions, installed modules, commands of MCP servers, the arguments of functions and of vLLM, and
interpreters of stages that a pool runs.

    recipe, paths = make_absolute(load("recipe.toml"), "work pool gpu")
    check_visible(paths, mounts=("/srv/quiver",), where="work pool gpu (docker)")
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quiver.flows.preflight import preflight
from quiver.flows.recipe import NIGHT, Recipe
from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.config import parse
from quiver.stages.core.store.places import is_url
from quiver.stages.prompt.config import SUFFIXES
from quiver.stages.turns.environment_config import ENVIRONMENTS, TOOLS

Paths = dict[str, Path]
"""Absolute paths by the key that names them, such as `data.source`."""
_DATASETS = "datasets:"
_PYTHON = "placement.python."
_MADE_LATER = ("store", "optimize.tracker_folder")
"""Keys of folders that a run makes."""
Reading = tuple[Path | None, str]
"""The path in a text, and what follows it, such as `:function`. None: the text is no path.
Readers are also told in which folder a path may be looked for."""


def make_absolute(
    recipe: Recipe, where: str, *, folder: str | Path | None = None, must_exist: bool = True
) -> tuple[Recipe, Paths]:
    """Return the recipe with absolute paths, and those paths.

    Args:
        folder: Folder of relative paths. Default: the current folder. If it is not here, a model
            `a/b` is a path if the current folder has it, and else a hub id.
        must_exist: If false, files may lie in a container image and are not checked. The store and
            the trackers' folder never need to exist yet.

    Raises ConfigError if a path is missing, or if a module is found only in the current folder.
    """
    base = Path(folder or "").absolute()
    # a folder that is not here is inside an image, whose files are taken to lie here as well
    seen = base if base.is_dir() else Path.cwd()
    sections = recipe.model_dump(mode="json", exclude_unset=True)
    sections.setdefault("store", recipe.store)
    paths: Paths = {}
    for key, kind in PATHS.items():
        for holder, last, name in _values(sections, key.split("."), []):
            is_elsewhere = name.removeprefix(_PYTHON) in recipe.placement.pools
            if is_url(holder[last]) or is_elsewhere:
                continue
            path, function = kind(holder[last], seen)
            path = path and base / path
            if path is None:
                _check_importable(name, holder[last], where)
                continue
            paths[name] = path
            before = _DATASETS if holder[last].startswith(_DATASETS) else ""
            holder[last] = f"{before}{path}{function}"
            # a file named after a night may not exist yet
            is_made_later = name in _MADE_LATER or NIGHT in str(path)
            if must_exist and not is_made_later and not path.exists():
                raise ConfigError(
                    f"{name} {printable(path)}",
                    "there is no such file or folder",
                    next=f"correct {name}",
                )
    return parse(Recipe, sections, f"recipe {recipe.run}"), paths


def check_runnable(recipe: Recipe, paths: Paths) -> None:
    """Make the checks that `quiver run` makes before anything runs. `recipe` and `paths` come from
    `make_absolute`.

    Nothing is checked if a file is named after a night, since it may not exist yet.
    """
    if not any(NIGHT in str(path) for path in paths.values()):
        preflight(recipe.for_night(f"{datetime.now(UTC):%Y-%m-%d}"))


def check_visible(paths: Paths, mounts: tuple[str, ...], where: str) -> None:
    """Raise ConfigError if a container would not see a path: one in this host's home or temporary
    folder that is below none of `mounts`."""
    private_folders = (
        Path.home(),
        Path(tempfile.gettempdir()).absolute(),
        Path("/tmp"),
        Path("/home"),
        Path("/root"),
    )
    for name, path in paths.items():
        if any(path.is_relative_to(mount) for mount in mounts):
            continue
        for private in private_folders:
            if private != Path("/") and path.is_relative_to(private):
                raise ConfigError(
                    f"{name} {printable(path)}",
                    f"lies in {private} of this host, which {where} cannot see",
                    next=f"put it where every host sees it under the same path, or mount {private} "
                    "in the pool's volumes",
                )


# -- what a value names


def _path(text: str, seen: Path) -> Reading:
    return Path(os.path.expanduser(text)), ""


def _code(text: str, seen: Path) -> Reading:
    """Split `file.py:function`. A module, or the name of one of Quiver's functions, is no path."""
    holder, colon, attribute = text.rpartition(":")
    return (_path(holder, seen)[0], colon + attribute) if holder.endswith(".py") else (None, "")


def _model(text: str, seen: Path) -> Reading:
    """Read a model: a directory or file that exists below `seen`, or a text that looks like a path;
    else a function, a package's file, or a hub id."""
    path = Path(os.path.expanduser(text))
    looks_like = text.startswith((".", "/", "~")) or path.suffix == ".gguf" or text.count("/") > 1
    is_path = (seen / path).exists() or (looks_like and ":" not in text)
    return (path, "") if is_path and not text.startswith("package:") else _code(text, seen)


def _rows(text: str, seen: Path) -> Reading:
    if text.startswith(_DATASETS):  # a folder, or a hub id
        return _model(text.removeprefix(_DATASETS), seen)
    return _path(text, seen) if Path(text).suffix in SUFFIXES else _code(text, seen)


def _interpreter(text: str, seen: Path) -> Reading:
    """Search PATH for a bare name. Links are not followed, since a virtual environment's python is
    one."""
    return _path(text if "/" in text else shutil.which(text) or text, seen)


_PATHS: dict[str, Callable[[str, Path], Reading]] = {
    "store": _path,
    "policy.model": _model,
    "data.source": _rows,
    "prompt.template": _path,
    "generate.engine": _code,
    "generate.options.script": _code,
    "generate.turns.environment": _code,
    "generate.turns.tools.*": _code,
    "generate.turns.parser": _code,
    "reward.functions.*.use": _code,
    "reward.functions.*.arguments.model": _model,
    "reward.functions.*.arguments.sandbox_python": _interpreter,
    "reward.models.*.model": _model,
    "reward.models.*.template": _path,
    "optimize.algorithm": _code,
    "optimize.critic_from": _model,
    "optimize.tracker_folder": _path,
    "placement.python.*": _interpreter,
}
_HELD_OUT = {"generate.": "evaluate.generate.", "data.": "data.held_out."}
"""Sections whose keys may have other values for the held-out rows, and where these are."""
PATHS = _PATHS | {
    held_out + key.removeprefix(section): kind
    for section, held_out in _HELD_OUT.items()
    for key, kind in _PATHS.items()
    if key.startswith(section)
}
"""Reader of every key of a recipe that may name a path."""


_NO_MODULES = tuple(f"{name}:" for name in ("package", "datasets", *ENVIRONMENTS, *TOOLS))
"""Prefixes before a colon that are no modules."""


def _values(holder: Any, keys: list[str], before: list[str]) -> Iterator[tuple[Any, Any, str]]:
    """Yield the texts in `holder` at `keys` (`*`: each entry) as their container, their key in it,
    and their full dotted name."""
    first, *further = keys
    if isinstance(holder, list):
        names = range(len(holder)) if first == "*" else []
    else:
        names = list(holder) if first == "*" else [first] if first in holder else []
    for name in names:
        path = [*before, str(name)]
        entry = holder[name]
        if further and isinstance(entry, dict | list):
            yield from _values(entry, further, path)
        elif not further and isinstance(entry, str) and entry:
            yield holder, name, ".".join(path)


def _check_importable(name: str, text: str, where: str) -> None:
    """Raise ConfigError if `module:function` is found only because the command runs in this
    folder."""
    module, colon, function = text.rpartition(":")
    if not colon or not module.replace(".", "").isidentifier() or text.startswith(_NO_MODULES):
        return
    here = {"", os.getcwd()}
    whole_path = sys.path[:]
    sys.path[:] = [entry for entry in sys.path if entry not in here]
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    finally:
        sys.path[:] = whole_path
    if spec is None:
        raise ConfigError(
            f"{name} {printable(text)}",
            f"module {module} is not installed, and {where} does not run in this folder",
            next=f"name its file, {module.replace('.', '/')}.py:{function}, or install it",
        )
