"""Calling reward functions on a batch: what they ask for is given by name, what they return is a number, null, or a named failure.

A failure never becomes a number: where a call raises, the batch is scored again row by row, so that only the rows that raise
carry the error. Async functions of a batch wait together. What a function prints goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from schemas.errors import ConfigError, printable
from stages.common import dotted

from .functions import FUNCTIONS

OFFERED = ("prompts", "completions", "completion_ids", "finish_reason")
LARGEST = 3.4028234663852886e38  # of a float32
Batch = Mapping[str, list[Any]]


class Part(NamedTuple):
    """What one function said of one row: a value, or an error, or neither (the function does not apply there)."""

    value: float | None = None
    error: str | None = None


@dataclass
class Scorer:
    """A reward function with its name, weight and arguments. `takes` is None where it takes every column."""

    name: str
    function: Callable[..., Any]
    weight: float
    arguments: dict[str, Any]
    takes: frozenset[str] | None
    needs: frozenset[str]
    fingerprint: str
    seconds: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether it is async."""
        call = self.function if inspect.isroutine(self.function) else getattr(self.function, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def keywords(self, batch: Batch) -> dict[str, Any]:
        """What it is called with: of the batch what it asks for, and its own arguments, which come first.

        They are copies: what one function changes in place no other sees, nor the same one in its next call.
        """
        chosen = {name: values for name, values in batch.items() if self.takes is None or name in self.takes}
        return _copied({**chosen, **self.arguments})


def _copied(value: Any) -> Any:
    """`value` with its lists and dicts made anew, all the way down."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value


def load(use: str, name: str, weight: float, arguments: dict[str, Any]) -> Scorer:
    """The function that a recipe names. ConfigError: there is none of that name, or it can not take the arguments."""
    if ":" in use:
        function, sha256 = dotted.load(use, "reward function")
        fingerprint = f"sha256:{sha256}"
    elif use in FUNCTIONS:
        function, fingerprint = FUNCTIONS[use].function, f"quiver:{FUNCTIONS[use].version}"
    else:
        near = difflib.get_close_matches(use, FUNCTIONS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FUNCTIONS)}"
        raise ConfigError(
            f"reward function {printable(use)}",
            f"no function of that name comes with Quiver; {hint}",
            next="quiver rewards lists them; your own is module:function or file.py:function",
        )
    takes, needs = _parameters(function, name)
    unknown = sorted(set(arguments) - takes) if takes is not None else []
    if unknown:
        near = difflib.get_close_matches(unknown[0], takes or (), 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(takes or ()))}"
        raise ConfigError(
            f"reward function {name}",
            f"takes no argument {printable(unknown[0])}; {hint}",
            next="correct arguments of that function in the recipe",
        )
    return Scorer(name, function, weight, arguments, takes, needs - set(arguments), fingerprint)


def _parameters(function: Callable, name: str) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Names that it may be called with (None: any), and those without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, frozenset()
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(
            f"reward function {name}", "has positional-only parameters; it is called by keyword", next="take the / out"
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needs = frozenset(p.name for p in named if p.default is p.empty)
    return None if everything else frozenset(p.name for p in named), needs


def require_columns(scorer: Scorer, columns: Iterable[str]) -> None:
    """ConfigError unless everything that the function needs is offered, or a column, or an argument."""
    columns = sorted(columns)
    for missing in sorted(scorer.needs - {*OFFERED, *columns}):
        near = difflib.get_close_matches(missing, [*columns, *OFFERED], 1, 0.5)
        raise ConfigError(
            f"reward function {scorer.name}",
            f"needs {missing}, which is neither a column of the prompts ({printable(', '.join(columns)) or 'none'}) nor one of "
            f"{', '.join(OFFERED)}" + (f"; did you mean {near[0]}?" if near else ""),
            next="rename the column or the parameter, give it a default, or set it in arguments",
        )


# -- calls ------------------------------------------------------------------------------------------------------------------


def score(scorers: list[Scorer], batch: Batch) -> dict[str, list[Part]]:
    """Each function's parts for the rows of `batch`, which has at least one row and lists of equal length."""
    rows = len(batch["completions"])
    with contextlib.redirect_stdout(sys.stderr):
        parts = {scorer.name: _timed(scorer, batch, rows) for scorer in scorers if not scorer.waits}
        waiting = [scorer for scorer in scorers if scorer.waits]
        if waiting:
            answers = _wait([_timed_async(scorer, batch, rows) for scorer in waiting])
            parts |= {scorer.name: found for scorer, found in zip(waiting, answers, strict=True)}
    return parts


def _timed(scorer: Scorer, batch: Batch, rows: int) -> list[Part]:
    start = time.monotonic()
    try:
        return _call(scorer, batch, rows)
    finally:
        scorer.seconds += time.monotonic() - start


def _call(scorer: Scorer, batch: Batch, rows: int) -> list[Part]:
    try:
        returned = scorer.function(**scorer.keywords(batch))
    except (Exception, SystemExit) as error:
        if rows == 1:
            return [_raised(error)]
        return [_call(scorer, _row(batch, row), 1)[0] for row in range(rows)]
    return read(returned, rows)


async def _timed_async(scorer: Scorer, batch: Batch, rows: int) -> list[Part]:
    start = time.monotonic()
    try:
        return await _call_async(scorer, batch, rows)
    finally:
        scorer.seconds += time.monotonic() - start


async def _call_async(scorer: Scorer, batch: Batch, rows: int) -> list[Part]:
    try:
        returned = await scorer.function(**scorer.keywords(batch))
    except (Exception, SystemExit) as error:
        if rows == 1:
            return [_raised(error)]
        return [parts[0] for parts in await asyncio.gather(*(_call_async(scorer, _row(batch, r), 1) for r in range(rows)))]
    return read(returned, rows)


def _wait(work: list[Coroutine[Any, Any, list[Part]]]) -> list[list[Part]]:
    async def together() -> list[list[Part]]:
        return await asyncio.gather(*work)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(together())
    with ThreadPoolExecutor(1) as pool:  # the caller is a notebook or a server with a loop of its own
        return pool.submit(asyncio.run, together()).result()


def _row(batch: Batch, row: int) -> dict[str, list[Any]]:
    return {name: values[row : row + 1] for name, values in batch.items()}


def _raised(error: BaseException) -> Part:
    return Part(error=printable("".join(traceback.format_exception_only(error)).strip()))


# -- what came back -----------------------------------------------------------------------------------------------------------


def read(returned: Any, rows: int) -> list[Part]:
    """One part a row of what a function returned: a list, or an array or tensor of one dimension. Anything else: errors."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        return [Part(error=f"returned {type(returned).__name__}, expected a list of {rows} floats")] * rows
    if len(values) != rows:
        return [Part(error=f"returned {len(values)} values for {rows} rows")] * rows
    return [_read_one(value) for value in values]


def _read_one(value: Any) -> Part:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return Part()
    if not isinstance(value, int | float):  # True and False are 1 and 0; text is never read as a number
        return Part(error=printable(f"returned {type(value).__name__} {value!r}, expected a float or None"))
    if not abs(value) <= LARGEST:  # NaN compares false
        shown = value if isinstance(value, float) else "an integer"
        return Part(error=f"returned {shown}, which is not finite as float32")
    return Part(float(value))
