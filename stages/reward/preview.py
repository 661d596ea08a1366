"""Check rewards from names, files and columns alone, before a process is started.

A user's function is parsed, not run. This finds a file without the function, an argument that it
does not take, and a column that the source lacks. The stage's `check` finds the errors that only a
call can show.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any, NamedTuple

from quiver.stages.common import plugins

from .config import Config, pinned
from .functions import shipped
from .functions.config import FunctionConfig
from .pool.calls import About, describe
from .pool.habits import VERL_COLUMNS, column_of, require
from .servers.dialects.rows import fields


class Reads(NamedTuple):
    """Columns of the source that the rewards read."""

    by_name: set[str]
    """Columns that some scorer asks for by name."""
    may_be_all: bool
    """True if a scorer may read any other column too: a function with `**columns`, a server."""


def preview(config: Config, columns: Iterable[str]) -> Reads:
    """Return the `columns` of the source that are read. Raises ConfigError or SecurityError if a
    scorer is missing, or if it asks by name for a missing column."""
    pinned(config)
    columns = [*columns]
    by_name: set[str] = set()
    may_be_all = False
    for function in config.functions:
        callee = _callee(function)
        if callee is None:
            may_be_all = True
            continue
        about = describe(callee, function.name, function.arguments)
        require(function, about.needs, columns)
        by_name |= _read_by(function, about, columns)
        may_be_all |= about.takes is None and function.style == "quiver"
    for server in config.servers:
        by_name |= {*(server.columns or ()), server.label, *fields(server.rubric)}
        may_be_all |= server.dialect == "quiver" and server.columns is None
    return Reads(by_name.intersection(columns), may_be_all)


def _read_by(function: FunctionConfig, about: About, columns: list[str]) -> set[str]:
    """Return the columns that a function asks for by name."""
    takes = about.takes or about.needs
    if function.is_shipped:
        takes = [*about.needs, *shipped(function.use).columns]
    if function.style == "verl":
        takes = [*takes, *VERL_COLUMNS]
    parameters = {*takes, *function.columns} - function.arguments.keys()
    asked = {column_of(parameter, function, columns) for parameter in parameters}
    return {name if name in columns else name.partition(".")[0] for name in asked}


def _callee(config: FunctionConfig) -> Any:
    """Return a shipped function itself, or an empty function with the parameters of the user's.
    None if the parameters cannot be read."""
    if config.is_shipped:
        return shipped(config.use).function
    node = plugins.definition(config.use, "reward.functions.use")
    if node is None:
        return None
    parameters = node.args
    for parameter in ast.walk(parameters):
        if isinstance(parameter, ast.arg):
            parameter.annotation = None
    nothing = ast.Constant(None)
    parameters.defaults = [nothing for _ in parameters.defaults]
    parameters.kw_defaults = [default and nothing for default in parameters.kw_defaults]
    empty = ast.parse(f"def {node.name}(): pass")
    empty.body[0].args = parameters
    names: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(empty), config.use, "exec"), names)
    return names[node.name]
