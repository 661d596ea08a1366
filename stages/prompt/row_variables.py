"""The variables that a row gives to the chat template besides its messages.

These are its own tools and template arguments, in the columns that TRL and verl use. The module
also warns about columns that have a meaning in other trainers and are not used here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, did_you_mean, printable, quoted_name
from quiver.schemas.plain import problem_of, read_clean_json
from quiver.stages.common.names_elsewhere import COLUMNS

from .config import Config
from .messages import type_name

ARGUMENTS = "chat_template_kwargs"
"""Column with a row's own template arguments."""
_NOT_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
log = logging.getLogger(__name__)


class RowVariables(NamedTuple):
    """Variables of the template for one row."""

    tools: list[dict[str, Any]] | None = None
    """JSON schemas of functions."""
    arguments: Mapping[str, Any] = {}

    def as_variables(self) -> dict[str, Any]:
        """Return the variables under the template's names."""
        return {**self.arguments, **({"tools": self.tools} if self.tools else {})}


def columns_of(config: Config, columns: Iterable[str]) -> dict[str, str]:
    """Return the source's columns for the template, by purpose: `tools` and `arguments`.

    There are none with [generate.turns], which renders later turns without the row.
    """
    if not config.has_chats or config.turns is not None:
        return {}
    named = {"arguments": ARGUMENTS}
    if config.tools and "tools" not in config.template_arguments:
        named["tools"] = config.tools
    columns = set(columns) - {getattr(config, config.input)}
    return {what: column for what, column in named.items() if column in columns}


def read_variables(
    name: str, cells: Mapping[str, Any], reserved: Collection[str], tools_column: str = "tools"
) -> RowVariables:
    """Return the variables in row `name`'s cells of `columns_of`.

    `reserved` are variables that a row may not set. Raises ConfigError.
    """
    arguments = _parsed(name, ARGUMENTS, cells.get("arguments")) or {}
    if not isinstance(arguments, dict):
        raise _bad_cell(name, ARGUMENTS, f"holds {type_name(arguments)}, expected an object")
    for argument in arguments:
        if argument in _NOT_ARGUMENTS or argument in reserved:
            raise _bad_cell(name, ARGUMENTS, f"sets {argument}, which is no argument of a row")
    tools = _parsed(name, tools_column, cells.get("tools")) or []
    if not isinstance(tools, list):
        problem = f"holds {type_name(tools)}, expected a list of schemas"
        raise _bad_cell(name, tools_column, problem)
    return RowVariables([_read_tool(name, tools_column, tool) for tool in tools] or None, arguments)


def tell_unused(config: Config, columns: Collection[str]) -> None:
    """Warn once per source about unused columns that other trainers make prompts of.

    Raises ConfigError if the column named for tools is missing.
    """
    if config.tools not in ("", "tools", *columns):
        raise ConfigError(
            f"data.tools {quoted_name(config.tools)}",
            f"{printable(config.source)} has no such column; it has "
            f"{printable(', '.join(map(quoted_name, columns)))}"
            f"{did_you_mean(config.tools, columns)}",
            next="set data.tools to one of them",
        )
    used = {getattr(config, config.input), config.images, *columns_of(config, columns).values()}
    for column in columns:
        if column not in COLUMNS or column in used:
            continue
        if column == config.tools and (config.turns or "tools" in config.template_arguments):
            what_to_do = "the recipe says what the policy may call: take the column out"
        elif column == ARGUMENTS and config.turns:
            what_to_do = (
                "later turns are rendered without it, so set prompt.template_arguments, and take "
                "the column out"
            )
        else:
            what_to_do = COLUMNS[column]
        _warn(config.source, column, what_to_do)


@cache
def _warn(source: str, column: str, what_to_do: str) -> None:
    """Warn once in this process."""
    log.warning(
        "%s: column %s is not used in prompts: %s", printable(source), printable(column), what_to_do
    )


def _read_tool(name: str, column: str, tool: Any) -> dict[str, Any]:
    """Return a function's schema in transformers' form, with or without its wrapper."""
    tool = _parsed(name, column, tool)
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _bad_cell(
            name, column, f"has {printable(json.dumps(tool))[:80]}, expected a function's schema"
        )
    return tool


def _parsed(name: str, column: str, cell: Any) -> Any:
    """Return the value of JSON text; other cells are returned unchanged.

    Raises ConfigError if JSON cannot represent the value.
    """
    try:
        parsed = read_clean_json(cell) if isinstance(cell, str) and cell else cell
        problem = problem_of(parsed)
        if not problem:
            json.dumps(parsed)
    except (TypeError, ValueError) as error:
        problem = printable(error)
    if problem:
        raise _bad_cell(name, column, f"cannot be read: {problem}")
    return parsed


def _bad_cell(name: str, column: str, problem: str) -> ConfigError:
    way_out = ""
    if column != ARGUMENTS:
        way_out = ', or set data.tools = "" if the column is for something else'
    problem = f"column {quoted_name(column)} {problem}"
    return ConfigError(name, problem, next=f"correct the row{way_out}")
