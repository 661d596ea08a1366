"""Support reward functions that were written for TRL or verl: find their columns and call them as
those libraries do.

verl's `compute_score(data_source, solution_str, ground_truth, extra_info)` gets one row per call
and may return a mapping with the number under `score`. A function for TRL may ask for `log_extra`
and `log_metric`; the values it logs are kept beside the rows' numbers, in `extra`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.stages.reward.functions import shipped
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.scoring import OFFERED, Batch, cells_of, require_columns

LOGS = ("log_extra", "log_metric")
"""Parameters that are functions instead of columns, valid during a call."""
VERL_COLUMNS = {
    "data_source": "data_source",
    "solution_str": "completions",
    "ground_truth": "reward_model.ground_truth",
    "extra_info": "extra_info",
}
"""Sources of verl's parameters in rows with verl's layout."""
Callee = Callable[..., Any]


# -- which columns a function is given


class About(NamedTuple):
    """The calling convention of a reward function."""

    takes: list[str] | None
    """Names that it accepts. None: every column."""
    needs: list[str]
    """Names that it requires, beyond the recipe's arguments."""
    is_async: bool
    fingerprint: str = ""


def column_of(parameter: str, config: FunctionConfig, columns: Iterable[str]) -> str:
    """Return the column for `parameter`; `a.b` is the field b of column a."""
    if parameter in config.columns:
        return config.columns[parameter]
    if config.style == "verl" and parameter not in columns:
        return VERL_COLUMNS.get(parameter, parameter)
    return parameter


def takes_of(config: FunctionConfig, about: About) -> list[str] | None:
    """Return the parameters that columns may fill; None for any. A column must never replace a
    setting of a shipped function."""
    if config.is_shipped:
        return [*about.needs, *shipped(config.use).columns]
    return about.takes


def require(config: FunctionConfig, about: About, columns: Iterable[str]) -> None:
    """Raise ConfigError unless each parameter that the function needs, and each column that the
    recipe names for one, is offered or among `columns`, and the function takes the parameter.

    Args:
        columns: Names. A mapping also gives the fields of each (see `fields_of` of schemas.cells).
    """
    needs = about.needs
    owner = f"reward function {config.name}"
    if config.style == "quiver" and "solution_str" in {*needs} - {*columns, *config.columns}:
        raise ConfigError(
            owner,
            "needs solution_str, which verl gives: it is written for one row per call",
            next='set style = "verl" for it',
        )
    takes = takes_of(config, about)
    for parameter in config.columns if takes is not None else ():
        if parameter not in {*takes, *config.arguments}:
            hint = did_you_mean(parameter, takes, f"; it takes {', '.join(takes)}")
            raise ConfigError(
                owner,
                f"takes no column {printable(parameter)}{hint}",
                next="correct columns of that function in the recipe",
            )
    parameters = dict.fromkeys([*needs, *config.columns])
    require_columns(
        owner, [column_of(parameter, config, columns) for parameter in parameters], columns
    )


def require_sent(config: FunctionConfig, needs: Iterable[str], batch: Batch) -> None:
    """Raise ConfigError unless `batch` holds each name of OFFERED that the function `needs`. A
    request to a reward server may lack some."""
    for parameter in needs:
        column = column_of(parameter, config, batch)
        if column in OFFERED and column not in batch:
            raise ConfigError(
                f"reward function {config.name}",
                f"needs {column}, which the request does not hold",
                next=f"name {column} in reward.servers.columns of the recipe that sends the "
                "request",
            )


def given(config: FunctionConfig, takes: Iterable[str] | None, batch: Batch) -> Batch:
    """Return the columns of `batch` by parameter name.

    Args:
        takes: Parameters of the function. None: it takes any.

    The recipe's argument takes precedence over a column of the same name.
    """
    if takes is None:
        known = VERL_COLUMNS if config.style == "verl" else batch
        takes = [*known, *config.columns]
    columns = {}
    for parameter in dict.fromkeys(takes):
        cells = cells_of(column_of(parameter, config, batch), batch)
        if cells is not None and parameter not in config.arguments:
            columns[parameter] = cells
    if config.completions == "messages":
        for parameter in columns:
            if column_of(parameter, config, batch) == "completions":
                columns[parameter] = [
                    [{"role": "assistant", "content": text}] for text in batch["completions"]
                ]
    return columns


# -- in the process of a function


def adapted(function: Callee, style: str, arguments: dict[str, Any], extra: bool) -> Callee:
    """Wrap `function` so that it takes columns by keyword and returns one value per row.

    Args:
        arguments: Passed to a function of style verl, once per row.
        extra: If true, everything that comes beside the number is kept.
    """
    try:
        logs = [name for name in LOGS if name in inspect.signature(function).parameters]
    except (TypeError, ValueError):
        logs = []
    if logs:
        function = _with_logs(function, logs, extra)
    return _of_rows(function, arguments, extra) if style == "verl" else function


def _then(returned: Any, read: Callable[[Any], Any]) -> Any:
    """Apply `read` to what a call returned; to what it is awaited for, if it is async."""
    if not inspect.isawaitable(returned):
        return read(returned)

    async def later() -> Any:
        return read(await returned)

    return later()


def _of_rows(function: Callee, arguments: dict[str, Any], extra: bool) -> Callee:
    """Turn a function of one row into a function of columns."""

    def value(returned: Any) -> Any:
        if not isinstance(returned, Mapping) or "score" not in returned:
            return returned
        beside = {name: returned[name] for name in returned if name != "score"}
        return {**beside, "reward": returned["score"]} if extra else returned["score"]

    def score(**columns: list[Any]) -> Any:
        values = [
            function(**dict(zip(columns, row, strict=True)), **copy.deepcopy(arguments))
            for row in zip(*columns.values(), strict=True)
        ]
        if inspect.isawaitable(values[0]):  # then there is one row
            return _then(values[0], lambda returned: [value(returned)])
        return list(map(value, values))

    return score


def _with_logs(function: Callee, logs: list[str], extra: bool) -> Callee:
    """Wrap a function so that it gets `logs`, and returns the logged values beside its numbers."""
    told: set[str] = set()

    def joined(returned: Any, beside: dict[str, Any]) -> Any:
        if not extra:
            for name in beside.keys() - told:
                print(f"{name} is not kept: extra = true keeps what the function logs")
            told.update(beside)
            return returned
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if not beside or not isinstance(values, list | tuple):
            return returned
        for name, column in beside.items():
            if isinstance(column, list) and len(column) != len(values):
                raise ValueError(f"log_extra: {name} has {len(column)} values, {len(values)} rows")
        rows = []
        for row, number in enumerate(values):
            cells = {name: of[row] if isinstance(of, list) else of for name, of in beside.items()}
            rows.append(
                {**cells, **(number if isinstance(number, Mapping) else {"reward": number})}
            )
        return rows

    def call(**keywords: Any) -> Any:
        beside: dict[str, Any] = {}

        def log_extra(column: str, values: Iterable[Any]) -> None:
            beside[str(column)] = list(values)

        def log_metric(name: str, value: float) -> None:
            beside[str(name)] = value

        recorders = {"log_extra": log_extra, "log_metric": log_metric}
        returned = function(**keywords, **{name: recorders[name] for name in logs})
        return _then(returned, lambda values: joined(values, beside))

    return call
