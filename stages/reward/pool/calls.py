"""Call reward functions inside a `UserProcess`: give arguments by name, and read what is returned.
Look here for what counts as a valid return value.

The requests to the process (see `answering`), and their answers:

    {"key": …, "load": {use, name, arguments, extra, …}}
                                                  → {"about": […], "fingerprint": …, "error": null}
    {"key": …, "call": pickled columns, "rows": n, "at_once": …, "seconds": …}
                                                  → {"parts": [[row, value, error, extra], …],
                                                     "seconds": of the whole call,
                                                     "failure": why its rows were called one by one}

The answer to a call of an async function comes in pieces, at least one every BEAT_SECONDS. All but
the last have `seconds` null. Silence means that the event loop is blocked.

If a call on several rows fails as a whole (it raises, or returns no list of their number), the rows
are called one by one. Then only rows that fail alone carry the error. Async functions are called
with one row each, many at once. After each call the working folder, the environment and the
standard streams are restored.
"""

from __future__ import annotations

import copy
import inspect
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, did_you_mean, printable, shortage
from quiver.schemas.outside import is_finite
from quiver.stages.core import plugins
from quiver.stages.core.run.answering import no_copies
from quiver.stages.core.run.user_process import memory_limit, refusal
from quiver.stages.reward.functions import shipped
from quiver.stages.reward.pool.habits import LOGS, About, adapted
from quiver.stages.reward.scoring import Part, as_extra

BEAT_SECONDS = 0.5
Columns = dict[str, list[Any]]
Send = Callable[[dict[str, Any]], None]


class Answerer:
    """The functions that this process has loaded, by key."""

    def __init__(self) -> None:
        self._functions: dict[int, Function] = {}
        self._loop: Any = None
        """The event loop of all calls: what a function keeps open belongs to it."""

    def answer(self, request: dict[str, Any], send: Send) -> dict[str, Any]:
        """Return the answer to one request, or its last piece."""
        if "load" in request:
            return self._load(request["key"], **request["load"])
        function = self._functions[request["key"]]
        started = time.monotonic()
        failure = None
        if function.about.is_async:
            parts = self._call_together(function, request, send)
        else:
            calls, failure = call(function, lambda: pickle.loads(request["call"]), request["rows"])
            parts = [[row, *part] for row, part in enumerate(calls)]
        seconds = time.monotonic() - started
        return {"parts": parts, "seconds": seconds, "failure": failure}

    def _load(self, key: int, use: str, name: str, **options: Any) -> dict[str, Any]:
        try:
            function = self._functions[key] = load(use, name, **options)
        except BaseException as error:  # SystemExit too
            return {"error": refusal(error, f"reward function {name}", "reward.max_memory_gib")}
        about = function.about
        return {"about": about, "fingerprint": about.fingerprint, "error": None}

    def _call_together(
        self, function: Function, request: dict[str, Any], send: Send
    ) -> list[list[Any]]:
        """Call an async function, and return the rows that were not sent before."""
        import asyncio  # slow to import, and most processes do not need it

        finished: list[list[Any]] = []

        async def work() -> None:
            rows = asyncio.ensure_future(
                call_together(
                    function,
                    pickle.loads(request["call"]),
                    request["rows"],
                    request["at_once"],
                    request["seconds"],
                    lambda row, part: finished.append([row, *part]),
                )
            )
            while not (await asyncio.wait({rows}, timeout=BEAT_SECONDS))[0]:
                send({"parts": finished, "seconds": None, "failure": None})
                finished.clear()
            await rows

        self._loop = self._loop or asyncio.new_event_loop()
        self._loop.run_until_complete(work())
        return finished


class Function(NamedTuple):
    """A loaded reward function and its arguments."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    about: About
    extra: bool = False
    file: str = ""
    """A user's file, whose lines errors point to."""
    of_group: bool = False
    """True if all rows of a call belong together, so that they are never called one by one."""

    def keywords(self, columns: Columns) -> dict[str, Any]:
        """Return the keyword arguments of a call. The recipe's arguments override columns, and are
        copied, since a call may change them in place."""
        return {**columns, **copy.deepcopy(self.arguments)}


def load(
    use: str,
    name: str,
    arguments: dict[str, Any],
    extra: bool = False,
    style: str = "quiver",
    scope: str = "row",
) -> Function:
    """Return the function that a recipe names. Raises ConfigError if it does not exist or cannot
    take the arguments."""
    file = ""
    if ":" in use:
        function, sha256 = plugins.load(use, "reward.functions.use")
        fingerprint = f"sha256:{sha256}"
        file = str(plugins.locate(use, "reward function"))
    else:
        function = shipped(use).function
        fingerprint = shipped(use).fingerprint(arguments)
    about = describe(function, name, arguments, fingerprint)
    function = adapted(function, style, arguments, extra)
    arguments = {} if style == "verl" else arguments
    return Function(function, arguments, about, extra, file, of_group=scope == "group")


def describe(
    function: Callable[..., Any], name: str, arguments: dict[str, Any], fingerprint: str = ""
) -> About:
    """Inspect how `function` is called. Raises ConfigError if it cannot take the arguments."""
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return About(None, [], is_async, fingerprint)
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise ConfigError(
            f"reward function {name}",
            "has positional-only parameters; it is called by keyword",
            next="take the / out",
        )
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    defaults = {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.kind not in variadic and parameter.name not in LOGS
    }
    takes = sorted(defaults)
    for parameter in parameters:
        types = inspect.formatannotation(parameter.annotation).strip("'").split(" | ")
        is_truth = isinstance(arguments.get(parameter.name), bool)
        if is_truth and {"int", "float"} & set(types) and "bool" not in types:
            raise ConfigError(
                f"reward function {name}",
                f"{parameter.name} is a number, true or false was given",
                next="correct arguments of that function in the recipe",
            )
    needs = [
        name
        for name in takes
        if defaults[name] is inspect.Parameter.empty and name not in arguments
    ]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return About(None, needs, is_async, fingerprint)
    for unknown in sorted(set(arguments) - set(takes)):
        hint = did_you_mean(unknown, takes, f"; it takes {', '.join(takes)}")
        raise ConfigError(
            f"reward function {name}",
            f"takes no argument {printable(unknown)}{hint}",
            next="correct arguments of that function in the recipe",
        )
    return About(takes, needs, is_async, fingerprint)


# -- calls


def call(
    function: Function, fresh: Callable[[], Columns], num_rows: int
) -> tuple[list[Part], str | None]:
    """Return one part per row, and the reason if the rows were called one by one.

    Args:
        fresh: Returns new copies of the columns, since a call may change them in place.
    """
    parts, length = _call_once(function, fresh(), num_rows)
    if num_rows in (length, 1) or function.of_group:
        return parts, None
    failure = parts[0].error
    columns = fresh()
    calls = [_call_once(function, pick(columns, range(row, row + 1)), 1) for row in range(num_rows)]
    if length is not None and sum(row_length or 0 for _, row_length in calls) != length:
        # the values belong to no single row (perhaps a mean of all), so none of them can be trusted
        return parts, failure
    return [row_parts[0] for row_parts, _ in calls], failure


def pick(columns: Columns, rows: range) -> Columns:
    """Return the columns of some rows."""
    return {name: column[rows.start : rows.stop] for name, column in columns.items()}


def _call_once(
    function: Function, columns: Columns, num_rows: int
) -> tuple[list[Part], int | None]:
    """Return the parts of one call, and the number of values it returned; None if it raised or
    returned no list."""
    try:
        with _surroundings():
            returned = function.call(**function.keywords(columns))
        return read(returned, num_rows, function.extra)
    # SystemExit and KeyboardInterrupt too: they come from the function, since no user interrupts
    # this process
    except BaseException as error:
        return [_raised(error, function.file)] * num_rows, None


async def call_together(
    function: Function,
    columns: Columns,
    num_rows: int,
    at_once: int,
    seconds: float,
    report: Callable[[int, Part], None],
) -> None:
    """Call an async function for each row (or for the one group). At most `at_once` calls wait
    together, each for at most `seconds`. `report` is called as each row is done."""
    import asyncio  # slow to import, and most processes do not need it

    gate = asyncio.Semaphore(at_once)

    async def call_rows(rows: range) -> list[Part]:
        try:
            with no_copies():
                returned = await function.call(**function.keywords(pick(columns, rows)))
            return read(returned, len(rows), function.extra)[0]
        except BaseException as error:
            return [_raised(error, function.file)] * len(rows)

    async def call_in_time(rows: range) -> None:
        async with gate:
            task = asyncio.ensure_future(call_rows(rows))
            done, _ = await asyncio.wait({task}, timeout=seconds)
            task.cancel()  # not awaited, since it may ignore the cancellation
            parts = task.result() if done else [late(seconds)] * len(rows)
            for row, part in zip(rows, parts, strict=True):
                report(row, part)

    calls = [range(row, row + 1) for row in range(num_rows)]
    if function.of_group:
        calls = [range(num_rows)]
    with _surroundings():
        await asyncio.gather(*map(call_in_time, calls))


@contextmanager
def _surroundings() -> Iterator[None]:
    """Restore working folder, environment and standard streams after a call, and end any copy of
    the process that the call forked."""
    environment = os.environ.copy()
    folder = os.open(".", os.O_RDONLY)
    streams = sys.stdout, sys.stderr
    try:
        with no_copies():
            yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        if os.environ.copy() != environment:
            os.environ.clear()
            os.environ.update(environment)
        sys.stdout, sys.stderr = streams


def late(seconds: float) -> Part:
    """Return the part of a row that took too long."""
    return Part(error=f"TimeoutError: no answer within {seconds:g} s")


def _raised(error: BaseException, file: str = "") -> Part:
    """Return the part of a row in which `error` was raised, with the line in the folder of
    `file`."""
    text = "".join(traceback.format_exception_only(error)).strip()
    text = printable(text[:1000])  # cut first: the text may be very long
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        folder, name = os.path.split(frame.f_code.co_filename)
        if file and folder == os.path.dirname(file):
            place = f" ({printable(name)}:{line})"
    if isinstance(error, TypeError) and "string indices must be integers" in text:
        place += '; with completions = "messages" a completion is [{"role", "content"}], not text'
    limit = memory_limit()
    if limit is not None and shortage(error) is not None:
        return Part(error=f"{text}{place}: {memory_allowance(limit)}")
    return Part(error=text + place)


def memory_allowance(limit: int) -> str:
    """Describe a process's memory limit, in bytes, and the key that raises it."""
    return f"a reward worker may have {limit / 2**30:.3g} GiB, reward.max_memory_gib"


# -- what came back


def read(returned: Any, num_rows: int, extra: bool = False) -> tuple[list[Part], int | None]:
    """Read the value of a call: a list, or an array or tensor of one dimension, with one item per
    row.

    Args:
        extra: If true, an item may be a mapping with the number under `reward`; the rest is kept.

    Returns:
        One part per row, and the length of the value; None if it has no length. A value of another
        form or length is an error of every row.
    """
    values = _to_list(returned)
    length = len(values) if isinstance(values, list | tuple) else None
    if length == num_rows:
        return [_read_row(value, extra) for value in values], length
    error = f"returned {length} values for {num_rows} rows"
    if length is None:
        error = f"returned {type(returned).__name__}, expected a list of {num_rows} floats"
    return [Part(error=error)] * num_rows, length


def _to_list(array: Any) -> Any:
    """Convert an array or tensor to Python's own numbers; return anything else unchanged."""
    return array.tolist() if hasattr(array, "tolist") else array


def _read_row(returned: Any, extra: bool) -> Part:
    number = _to_list(returned)
    kind = type(number).__name__
    if number is None:
        return Part()
    if isinstance(number, Mapping):
        return _read_mapping(number, extra)
    if not isinstance(number, int | float):  # True and False are 1 and 0; text is no number
        shown = repr(number)[:1000]
        return Part(error=printable(f"returned {kind} {shown}, expected a float or None"))
    if not is_finite(number):
        shown = number if isinstance(number, float) else "an integer"
        return Part(error=f"returned {shown}, which is not finite as float32")
    return Part(float(number))


def _read_mapping(members: Mapping, extra: bool) -> Part:
    kind = type(members).__name__
    if not extra:
        return Part(
            error=f"returned {kind}, expected a float or None; extra = true lets it return mappings"
        )
    if "reward" not in members:
        return Part(error=f"returned {kind} without a key reward")
    if isinstance(members["reward"], Mapping):
        return Part(error="returned a mapping under the key reward, expected a float or None")
    try:  # values without JSON are kept as text
        text = as_extra({str(key): _plain(members[key]) for key in members if key != "reward"})
    except (ValueError, RecursionError) as error:  # a circular or endlessly deep value
        text = as_extra({"unreadable": _raised(error).error})
    return _read_row(members["reward"], extra)._replace(extra=text)


def _plain(member: Any) -> Any:
    member = _to_list(member)
    if isinstance(member, Mapping):
        return {str(key): _plain(below) for key, below in member.items()}
    if isinstance(member, list | tuple):
        return [_plain(below) for below in member]
    if isinstance(member, set | frozenset):  # its own order differs from process to process
        return [_plain(below) for below in sorted(member, key=repr)]
    if isinstance(member, float):
        return member if abs(member) < float("inf") else str(member)
    return member if member is None or isinstance(member, int | str) else printable(member, 1000)
