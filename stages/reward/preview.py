"""What can be told of rewards from names, files and columns alone, before a process is started.

A user's function is read and not run: a file without it, an argument that it does not take, a
column that it asks for and the source does not have. What only trying can tell is left to the
stage's `check`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from quiver.stages.common import plugins

from .config import Config, pinned
from .functions import shipped
from .functions.config import FunctionConfig
from .pool.calls import describe
from .pool.habits import column_of, require


def preview(config: Config, columns: Iterable[str]) -> None:
    """ConfigError or SecurityError unless everything that scores is there, and finds what it asks
    for by name among the `columns` of the source."""
    pinned(config)
    for function in config.functions:
        callee = _callee(function)
        if callee is not None:
            needs = describe(callee, function.name, function.arguments).needs
            require(function, needs, columns)


def asked_columns(config: Config, columns: Iterable[str]) -> set[str]:
    """Those of the `columns` of a source that something which scores asks for, as far as names
    tell: a server may ask for any."""
    columns = set(columns)
    if config.servers:
        return columns
    asked: set[str] = set()
    for function in config.functions:
        callee = _callee(function)
        takes = None
        if callee is not None:
            takes = describe(callee, function.name, function.arguments).takes
        if takes is None:
            return columns
        for parameter in takes:
            asked.add(column_of(parameter, function, columns).partition(".")[0])
    return asked & columns


def _callee(config: FunctionConfig) -> Any:
    """A function with the parameters of the one that is named, and nothing in it; a shipped one
    itself. None where parameters can not be read."""
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
