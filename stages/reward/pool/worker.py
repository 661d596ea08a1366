"""The process in which reward functions run: python -P worker.py CONNECTION (a descriptor)

It is started as a file (-P: the files beside it do not stand in for libraries), and finds all other
modules by the path that comes with each load. Requests are pickled by the stage, answers are JSON:
the stage never unpickles what came from a process that ran user's code.

    {"path": sys.path, "key": …, "load": {use, name, arguments, extra}}
                                                  → {"about": […], "error": {…}}, one of them null
    {"key": …, "call": pickled columns, "rows": n, "at_once": …, "seconds": …}
                                                  → {"parts": [[row, value, error, extra], …],
                                                     "seconds": of the whole call,
                                                     "failure": why its rows were called one by one}

The answer to a call of an async function comes in pieces, at least one each BEAT_SECONDS, all but
the last with `seconds` null; silence says that its loop is blocked.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

BEAT_SECONDS = 0.5


def main() -> None:
    """Answer requests until their connection is closed."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    # what a process printed before it was killed is to be seen
    sys.stdout.reconfigure(line_buffering=True)
    functions: dict[int, Any] = {}

    def send(answer: dict[str, Any]) -> None:
        connection.send_bytes(json.dumps(answer).encode())

    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # without waiting for threads that a function left
        if "load" in request:
            sys.path[:] = request["path"]
            send(_load(functions, request["key"], **request["load"]))
            continue
        function = functions[request["key"]]
        started = time.monotonic()
        parts, failure = _call(function, request, send)
        seconds = time.monotonic() - started
        send({"parts": parts, "seconds": seconds, "failure": failure})


def _load(functions: dict[int, Any], key: int, use: str, name: str, **options: Any) -> dict:
    from quiver.schemas.errors import ConfigError, QuiverError, ResourceError, printable
    from quiver.stages.common.runtime import workers
    from quiver.stages.reward.pool import calls

    try:
        functions[key] = calls.load(use, name, **options)
        return {"about": functions[key].about, "error": None}
    except QuiverError as error:
        refusal = error
        if workers.is_out_of_memory(error.__cause__):
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
            f"can not be loaded: {type(error).__name__}: {printable(error)}",
            next=f"see what importing {use} does",
        )
    return {"about": None, "error": refusal.to_dict()}


def _call(
    function: Any, request: dict[str, Any], send: Callable[[dict[str, Any]], None]
) -> tuple[list[list[Any]], str | None]:
    """The rows that were not sent before, and why they were called one by one, if they were."""
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


if __name__ == "__main__":
    main()
