"""Check rewards before anything is generated.

`preview` reads names, files and columns alone; a user's function is parsed, not run. It finds a
file without the function, an argument that it does not take, and a column that the source lacks.
The stage's `check` finds the errors that only a call can show.

`refusals` finds references (right answers, schemas) that a shipped function cannot read. Such a
mistake of a row is distinguished from a mistake of the function.

    column_of_reference(function, ["question", "solution"])    # "solution"; None without one
    refusals(config, rows)        # {2: ("numeric", "solution", "ValueError: the answer 'NaN' …")}
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from quiver.schemas.errors import printable
from quiver.stages.core import plugins

from .config import Config, with_fingerprints
from .functions import shipped
from .functions.config import FunctionConfig
from .pool.calls import describe
from .pool.habits import VERL_COLUMNS, column_of, require, takes_of
from .pool.pool import Pool
from .pool.scorer import FunctionScorer
from .servers.dialects import require_named

_COMPLETIONS = ("0", r"\boxed{x}")
"""Completions that every comparing function reads quickly: a number, which is JSON too, and a
formula, since an answer may be read only beside one of them."""


class Reads(NamedTuple):
    """Columns of the source that the rewards read."""

    by_name: dict[str, str]
    """Names of columns and fields (`a.b`) that some scorer asks for, each with its column."""
    may_be_all: bool
    """True if a scorer may read any other column too: a function with `**columns`, a server."""


def preview(config: Config, columns: Iterable[str]) -> Reads:
    """Return the `columns` of the source that are read. Raises ConfigError or SecurityError if a
    scorer is missing, or if it asks by name for a missing column, or a missing field where
    `columns` is a mapping that gives their fields (see `require_columns` of scoring)."""
    columns = columns if isinstance(columns, Mapping) else [*columns]
    with_fingerprints(config)
    names: set[str] = set()
    may_be_all = False
    for function in config.functions:
        callee = _callee(function)
        if callee is None:
            may_be_all = True
            continue
        about = describe(callee, function.name, function.arguments)
        require(function, about, columns)
        takes = takes_of(function, about)
        parameters = {*(takes or about.needs), *function.columns} - function.arguments.keys()
        if function.style == "verl":
            parameters |= VERL_COLUMNS.keys() - function.arguments.keys()
        names |= {column_of(parameter, function, columns) for parameter in parameters}
        may_be_all |= takes is None and function.style == "quiver"
    for server in config.servers:
        names |= require_named(server, columns)
        may_be_all |= server.dialect == "quiver" and server.columns is None
    by_name = {name: name if name in columns else name.partition(".")[0] for name in names}
    return Reads({name: of for name, of in by_name.items() if of in columns}, may_be_all)


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


# -- references


def column_of_reference(function: FunctionConfig, columns: Iterable[str]) -> str | None:
    """Return the column whose cell the completions of a row are compared with; None for a function
    that does not come with Quiver, or compares with none."""
    parameter = shipped(function.use).reference if function.is_shipped else ""
    if not parameter or parameter in function.arguments:
        return None
    return column_of(parameter, function, columns)


def source_row(prompts: Mapping[str, Any], group_id: str) -> str:
    """Return the place of the row of `group_id` in its source, from the config of its prompts: file
    and row, or its group if rows have names of their own."""
    source = printable(prompts.get("source", "prompts"))
    number = group_id.removeprefix(prompts.get("group_prefix", ""))
    if prompts.get("group_id") is None and number.isdecimal():
        return f"{source} row {int(number) + 1}"
    return f"{source}, group {printable(group_id)}"


def refusals(config: Config, rows: pa.Table) -> dict[int, tuple[str, str, str]]:
    """Return the rows whose reference a shipped function refuses, by position, each with the first
    such function, the column and the error. Functions that run programs or models are skipped.
    Raises ResourceError if no process can be started."""
    refused: dict[int, tuple[str, str, str]] = {}
    with Pool(config.workers, config.max_memory_gib) as pool:
        for function in config.functions:
            column = column_of_reference(function, rows.column_names)
            if column is None or not shipped(function.use).is_quick:
                continue
            outer = column if column in rows.column_names else column.partition(".")[0]
            if outer not in rows.column_names:
                continue  # a column that the stage adds, such as prompt_text
            alone = function.model_copy(update={"scope": "row", "completions": "text"})
            scorer = FunctionScorer(alone, pool, config.batch_rows)
            scorer.is_told = True  # the errors are returned, so the log need not have them
            for completion in _COMPLETIONS:
                batch = {
                    outer: rows[outer].to_pylist(),
                    "completions": [completion] * rows.num_rows,
                    "rollout_ids": [None] * rows.num_rows,
                }
                for row, part in enumerate(scorer.score(batch)):
                    if part.error is not None:
                        refused.setdefault(row, (function.name, column, part.error))
    return refused
