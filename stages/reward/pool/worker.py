"""The requests to reward functions in a worker process (see `answering`), and their answers.

    {"key": …, "load": {use, name, arguments, extra}}
                                                  → {"about": […], "error": {…}}, one of them null
    {"key": …, "call": pickled columns, "rows": n, "at_once": …, "seconds": …}
                                                  → {"parts": [[row, value, error, extra], …],
                                                     "seconds": of the whole call,
                                                     "failure": why its rows were called one by one}

The answer to a call of an async function comes in pieces, at least one every BEAT_SECONDS. All but
the last have `seconds` null. Silence means that the event loop is blocked.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

BEAT_SECONDS = 0.5


Send = Callable[[dict[str, Any]], None]


class Host:
    """The functions that this process has loaded, by key."""

    def __init__(self) -> None:
        self._functions: dict[int, Any] = {}

    def answer(self, request: dict[str, Any], send: Send) -> dict[str, Any]:
        """Return the answer to one request, or its last piece."""
        if "load" in request:
            return _load(self._functions, request["key"], **request["load"])
        function = self._functions[request["key"]]
        started = time.monotonic()
        parts, failure = _call(function, request, send)
        seconds = time.monotonic() - started
        return {"parts": parts, "seconds": seconds, "failure": failure}


def _load(functions: dict[int, Any], key: int, use: str, name: str, **options: Any) -> dict:
    from quiver.schemas.errors import ConfigError, QuiverError, ResourceError, printable, shortage
    from quiver.stages.common.runtime import workers
    from quiver.stages.reward.pool import calls

    try:
        functions[key] = calls.load(use, name, **options)
        return {"about": functions[key].about, "error": None}
    except QuiverError as error:
        refusal = error
        if shortage(error.__cause__) is not None:
            limit = workers.memory_limit()
            refusal = ResourceError(
                f"reward function {name}",
                f"importing {printable(use)} takes more memory than there is"
                + (f": {calls.memory_allowance(limit)}" if limit else ""),
                next="raise reward.max_memory_gib",
            )
    except BaseException as error:  # SystemExit, say
        refusal = ConfigError(
            f"reward function {name}",
            f"cannot be loaded: {type(error).__name__}: {printable(error)}",
            next=f"see what importing {use} does",
        )
    return {"about": None, "error": refusal.to_dict()}


def _call(function: Any, request: dict[str, Any], send: Send) -> tuple[list[list[Any]], str | None]:
    """Return the rows that were not sent before, and the reason if rows were called one by one."""
    from quiver.stages.reward.pool import calls

    if not function.about.is_async:
        parts, failure = calls.call(
            function, lambda: pickle.loads(request["call"]), request["rows"]
        )
        return [[row, *part] for row, part in enumerate(parts)], failure
    import asyncio  # slow to import, and most workers do not need it

    finished: list[list[Any]] = []

    async def work() -> None:
        rows = asyncio.ensure_future(
            calls.call_together(
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

    global _loop  # noqa: PLW0603  one for all calls: what a function keeps open belongs to it
    _loop = _loop or asyncio.new_event_loop()
    _loop.run_until_complete(work())
    return finished, None


_loop: Any = None
