"""Find references (right answers, schemas) that a shipped function cannot read. Such a mistake of a
row is reported before anything is generated, and is distinguished from a mistake of the function.

    column_of_reference(function, ["question", "solution"])    # "solution"; None without one
    refusals(config, rows)        # {2: ("numeric", "solution", "ValueError: the answer 'NaN' …")}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from quiver.schemas.errors import printable

from .config import Config
from .functions import shipped
from .functions.config import FunctionConfig
from .pool.habits import column_of
from .pool.pool import Pool
from .pool.scorer import FunctionScorer

_COMPLETION = "0"
"""A completion that every comparing function reads quickly, as a number and as JSON."""


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
            batch = {
                outer: rows[outer].to_pylist(),
                "completions": [_COMPLETION] * rows.num_rows,
                "rollout_ids": [None] * rows.num_rows,
            }
            scorer = FunctionScorer(alone, pool, config.batch_rows)
            scorer.is_told = True  # the errors are returned, so the log need not have them
            for row, part in enumerate(scorer.score(batch)):
                if part.error is not None:
                    refused.setdefault(row, (function.name, column, part.error))
    return refused
