"""The process in which reward functions run: python -P worker.py REQUESTS ANSWERS (two descriptors)

It is started as a file (-P: the files beside it do not stand in for libraries), and finds all other
modules by the path that the stage sends first. Requests are pickled by the stage, answers are JSON:
the stage never unpickles what came from a process that ran user's code.

    {"path": sys.path}                            comes first
    {"load": {key, use, name, arguments, extra}}  → {"about": {…}} or {"error": {…}}
    {"key": …, "call": pickled columns, "rows": n, "at_once": …, "seconds": …}
                                                  → {"parts": [[row, value, error, extra], …],
                                                     "done": …}

The answer to a call of an async function comes in pieces, at least one each BEAT_SECONDS; silence
says that its loop is blocked.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
import time
from typing import Any

BEAT_SECONDS = 0.5
LENGTH = struct.Struct("!Q")


def main() -> None:
    """Answer requests until their pipe is closed."""
    requests, answers = map(int, sys.argv[1:3])
    for handle in (requests, answers):
        os.set_inheritable(handle, False)
    # what a process printed before it was killed is to be seen
    sys.stdout.reconfigure(line_buffering=True)
    functions: dict[str, Any] = {}
    stream = os.fdopen(requests, "rb")
    while stream.peek(1):
        request = pickle.load(stream)
        if "path" in request:
            sys.path[:] = request["path"]
        elif "load" in request:
            _send(answers, _load(functions, request["load"]))
        elif functions[request["key"]].about.is_async:
            _send(answers, _call_async(functions[request["key"]], request, answers))
        else:
            _send(answers, _call(functions[request["key"]], request))
    os._exit(0)  # without waiting for threads that a function left


def _load(functions: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    from quiver.schemas.errors import ConfigError, QuiverError, printable
    from quiver.stages.reward.pool import calls

    key = request.pop("key")
    try:
        functions[key] = calls.load(**request)
    except QuiverError as error:
        return {"error": error.to_dict()}
    except BaseException as error:  # SystemExit, say
        refused = ConfigError(
            f"reward function {request['name']}",
            f"can not be loaded: {type(error).__name__}: {printable(error)}",
            next=f"see what importing {request['use']} does",
        )
        return {"error": refused.to_dict()}
    return {"about": functions[key].about._asdict()}


def _call(function: Any, request: dict[str, Any]) -> dict[str, Any]:
    from quiver.stages.reward.pool.calls import call

    started = time.monotonic()
    parts = call(function, lambda: pickle.loads(request["call"]), request["rows"])
    return {
        "parts": [[row, *part] for row, part in enumerate(parts)],
        "seconds": time.monotonic() - started,
        "done": True,
    }


def _call_async(function: Any, request: dict[str, Any], answers: int) -> dict[str, Any]:
    import asyncio

    from quiver.stages.reward.pool.calls import call_together

    started = time.monotonic()
    finished: list[list[Any]] = []

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            _send(answers, {"parts": finished[:], "done": False})
            finished.clear()

    async def work() -> None:
        beating = asyncio.ensure_future(beat())
        await call_together(
            function,
            pickle.loads(request["call"]),
            request["rows"],
            request["at_once"],
            request["seconds"],
            lambda row, part: finished.append([row, *part]),
        )
        beating.cancel()

    global _loop  # noqa: PLW0603  one for all calls: what a function keeps open belongs to it
    _loop = _loop or asyncio.new_event_loop()
    _loop.run_until_complete(work())
    return {"parts": finished, "seconds": time.monotonic() - started, "done": True}


_loop: Any = None


def _send(handle: int, answer: dict[str, Any]) -> None:
    encoded = json.dumps(answer).encode()
    unsent = memoryview(LENGTH.pack(len(encoded)) + encoded)
    while unsent:
        unsent = unsent[os.write(handle, unsent) :]


if __name__ == "__main__":
    main()
