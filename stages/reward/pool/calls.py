"""Calls of reward functions, as they happen inside a worker: what is asked for is given by name,
what comes back is read.

Where a call on several rows fails as a whole (it raises, or returns no list of their number), the
rows are called one by one, so that only those carry the error that fail alone. Async functions are
called with one row each, many at once. After each call the working folder, the environment and the
standard streams are what they were.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common import plugins as dotted
from quiver.stages.reward.functions import FUNCTIONS
from quiver.stages.reward.scoring import LARGEST, Part, as_extra

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Function:
    """A reward function that was found, and its arguments. `takes` is None where it takes every
    column."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    takes: frozenset[str] | None
    needs: frozenset[str]
    fingerprint: str
    extra: bool = False

    @property
    def waits(self) -> bool:
        """Whether it is async."""
        called = self.call if inspect.isroutine(self.call) else getattr(self.call, "__call__", None)  # noqa: B004
        return inspect.iscoroutinefunction(self.call) or inspect.iscoroutinefunction(called)

    def keywords(self, columns: Columns) -> dict[str, Any]:
        """What it is called with; its arguments come first, in copies, since a call may change them
        in place."""
        return {**columns, **_copied(self.arguments)}


def _copied(value: Any) -> Any:
    """`value` with its lists and dicts made anew, all the way down."""
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value


def load(use: str, name: str, arguments: dict[str, Any], extra: bool = False) -> Function:
    """The function that a recipe names. ConfigError: there is none of that name, or it can not take
    the arguments."""
    if ":" in use:
        call, sha256 = dotted.load(use, "reward function")
        fingerprint = f"sha256:{sha256}"
    elif use in FUNCTIONS:
        shipped = FUNCTIONS[use]
        call, fingerprint = (
            shipped.function,
            ":".join(filter(None, ["quiver", str(shipped.version), shipped.holds(arguments)])),
        )
    else:
        near = difflib.get_close_matches(use, FUNCTIONS, 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(FUNCTIONS)}"
        raise ConfigError(
            f"reward function {printable(use)}",
            f"no function of that name comes with Quiver; {hint}; your own is module:function or "
            "file.py:function",
            next="quiver rewards",
        )
    takes, needs = _parameters(call, name)
    unknown = sorted(set(arguments) - takes) if takes is not None else []
    if unknown:
        near = difflib.get_close_matches(unknown[0], takes or (), 1, 0.5)
        hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(takes or ()))}"
        raise ConfigError(
            f"reward function {name}",
            f"takes no argument {printable(unknown[0])}; {hint}",
            next="correct arguments of that function in the recipe",
        )
    return Function(call, arguments, takes, needs - set(arguments), fingerprint, extra)


def _parameters(function: Callable, name: str) -> tuple[frozenset[str] | None, frozenset[str]]:
    """Names that it may be called with (None: any), and those without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None, frozenset()
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise ConfigError(
            f"reward function {name}",
            "has positional-only parameters; it is called by keyword",
            next="take the / out",
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    needs = frozenset(p.name for p in named if p.default is p.empty)
    return None if everything else frozenset(p.name for p in named), needs


# -- calls


def call(function: Function, fresh: Callable[[], Columns], rows: int) -> list[Part]:
    """One part a row. `fresh` gives the columns anew, since a call may change them in place."""
    parts, length = _once(function, fresh(), rows)
    if rows in (length, 1):
        return parts
    columns = fresh()
    alone = [_once(function, pick(columns, row), 1) for row in range(rows)]
    if length is not None and sum(each or 0 for _, each in alone) != length:
        # its answers do not belong to rows (a mean of all, say): none of them is to be trusted
        return parts
    return [found[0] for found, _ in alone]


def pick(columns: Columns, row: int) -> Columns:
    """The columns of one row."""
    return {name: values[row : row + 1] for name, values in columns.items()}


def _once(function: Function, columns: Columns, rows: int) -> tuple[list[Part], int | None]:
    """The parts of one call, and how many values it returned; None where it raised or returned no
    list."""
    try:
        with _Surroundings():
            returned = function.call(**function.keywords(columns))
        return read(returned, rows, function.extra)
    # SystemExit and KeyboardInterrupt too: they are the function's, nobody interrupts a worker
    except BaseException as error:
        return [_raised(error)] * rows, None


async def call_together(
    function: Function,
    columns: Columns,
    rows: int,
    at_once: int,
    seconds: float,
    tell: Callable[[int, Part], None],
) -> None:
    """Call an async function for each row, `at_once` of them waiting together, each for `seconds`;
    `tell` as each is done."""
    import asyncio  # slow to import, and most workers need it not

    gate = asyncio.Semaphore(at_once)

    async def one(row: int) -> None:
        async with gate:
            task = asyncio.ensure_future(_once_async(function, pick(columns, row)))
            done, _ = await asyncio.wait({task}, timeout=seconds)
            task.cancel()  # and not waited for: it may refuse
            tell(row, task.result() if done else late(seconds))

    with _Surroundings():
        await asyncio.gather(*map(one, range(rows)))


async def _once_async(function: Function, columns: Columns) -> Part:
    process = os.getpid()
    try:
        return read(await function.call(**function.keywords(columns)), 1, function.extra)[0][0]
    except BaseException as error:
        return _raised(error)
    finally:
        _end_if_forked(process)


class _Surroundings:
    """Puts back working folder, environment and standard streams after a call, and ends a copy of
    the process that it forked."""

    def __enter__(self) -> None:
        self.process, self.environment, self.folder = (
            os.getpid(),
            os.environ.copy(),
            os.open(".", os.O_RDONLY),
        )
        self.streams = sys.stdout, sys.stderr

    def __exit__(self, *_: object) -> None:
        _end_if_forked(self.process)
        os.fchdir(self.folder)
        os.close(self.folder)
        if os.environ.copy() != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
        sys.stdout, sys.stderr = self.streams


def _end_if_forked(process: int) -> None:
    if os.getpid() != process:
        os._exit(
            0
        )  # a copy came back from the function into our code; only the worker itself goes on with it


def late(seconds: float) -> Part:
    """The part of a row that took too long."""
    return Part(error=f"TimeoutError: no answer within {seconds:g} s")


def _raised(error: BaseException) -> Part:
    try:
        text = "".join(traceback.format_exception_only(error)).strip()
    except BaseException as worse:
        text = f"{type(error).__name__}, whose text can not be had: {type(worse).__name__}"
    return Part(error=printable(text[:1000]))  # cut first: it may be of any length


# -- what came back


def read(returned: Any, rows: int, extra: bool = False) -> tuple[list[Part], int | None]:
    """One part a row of what a function returned, a list or an array or tensor of one dimension,
    and its length.

    Anything else is an error of every row; the length is None where it has none. `extra`: a value
    may be a mapping with the number under `reward`; what stands beside it is kept.
    """
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, list | tuple):
        return [
            Part(error=f"returned {type(returned).__name__}, expected a list of {rows} floats")
        ] * rows, None
    if len(values) != rows:
        return [Part(error=f"returned {len(values)} values for {rows} rows")] * rows, len(values)
    return [_read_one(value, extra) for value in values], rows


def _read_one(value: Any, extra: bool) -> Part:
    value = value.tolist() if hasattr(value, "tolist") else value
    if value is None:
        return Part()
    if isinstance(value, Mapping):
        return _read_mapping(value, extra)
    if not isinstance(
        value, int | float
    ):  # True and False are 1 and 0; text is never read as a number
        return Part(
            error=printable(
                f"returned {type(value).__name__} {repr(value)[:1000]}, expected a float or None"
            )
        )
    if not abs(value) <= LARGEST:  # NaN compares false
        shown = value if isinstance(value, float) else "an integer"
        return Part(error=f"returned {shown}, which is not finite as float32")
    return Part(float(value))


def _read_mapping(value: Mapping, extra: bool) -> Part:
    if not extra:
        return Part(
            error=f"returned {type(value).__name__}, expected a float or None; extra = true lets "
            "it return mappings"
        )
    if "reward" not in value:
        return Part(error=f"returned {type(value).__name__} without a key reward")
    if isinstance(value["reward"], Mapping):
        return Part(error="returned a mapping under the key reward, expected a float or None")
    rest = {str(name): item for name, item in value.items() if name != "reward"}
    return _read_one(value["reward"], extra)._replace(extra=_as_json(rest))


def _as_json(rest: dict[str, Any]) -> str:
    """JSON text, not longer than `as_extra` has it; what JSON has no word for is there as text."""
    try:
        return as_extra(_plain(rest))
    except (ValueError, RecursionError) as error:  # a circle, or depth without end
        return as_extra({"unreadable": _raised(error).error})


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    return value if value is None or isinstance(value, int | str) else printable(value, 1000)
