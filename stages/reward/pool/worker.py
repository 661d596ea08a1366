"""The process in which reward functions run: python -P worker.py REQUESTS ANSWERS LIFELINE (file
descriptors)

It is started as a file, by itself (-P: the files beside it do not stand in for libraries), and
finds all other modules by the path that the stage tells it first.

It is two processes. The worker loads functions and calls them. Its keeper waits for it, and for the
lifeline, a pipe that nobody writes to: when the worker ends, or the stage closes its end or dies,
by kill -9 too, the keeper kills the worker's session and everything that ever descended from it,
whatever session it went to (orphans come to the keeper, a subreaper). It then ends with the
worker's exit code, or 128 + the signal's number. The answers' pipe is at its end only then.

Requests are pickled by the stage, answers are JSON: the stage never unpickles what came from a
process that ran user's code.

    {"path": sys.path, "bytes": limit on memory or None}                   comes first
    {"load": {key, use, name, arguments, extra}}                           → {"about": {…}} or {"error": {…}}
    {"key": …, "call": pickled columns, "rows": n, "at_once": …, "seconds": …}
                                                                           → {"parts": [[row, value,
                                                                           error, extra], …],
                                                                           "done": …}

The answer to a call of an async function comes in pieces, at least one each BEAT_SECONDS; silence
says that its loop is blocked.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any

BEAT_SECONDS = 0.5
LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LAST_SECONDS = 3.0


def main() -> None:
    """Fork; this process is the keeper, its child the worker."""
    requests, answers, lifeline = map(int, sys.argv[1:4])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper, worker = os.getpid(), os.fork()
    if worker:
        os.close(requests)
        os._exit(_keep(worker, lifeline))
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)
    os.close(lifeline)
    for handle in (requests, answers):
        os.set_inheritable(handle, False)
    sys.stdout.reconfigure(
        line_buffering=True
    )  # what a process printed before it was killed is to be seen
    _serve(requests, answers)
    os._exit(0)  # without waiting for threads that a function left


# -- the keeper


def _keep(worker: int, lifeline: int) -> int:
    """Wait for the end of the worker or of the stage, then kill all that is left. The worker's exit
    code."""
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    events = (
        select.poll()
    )  # select() refuses handles beyond 1023, and these have the stage's numbers
    events.register(lifeline)
    events.register(awake, select.POLLIN)
    ended: dict[int, int] = {}
    _reap(ended)
    while worker not in ended:
        if lifeline in dict(events.poll()):
            break
        os.read(awake, 4096)
        _reap(ended)
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + _LAST_SECONDS
    while _reap(ended) and time.monotonic() < deadline:
        for child in _children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(ended[worker]) if worker in ended else -signal.SIGKILL
    return code if code >= 0 else 128 - code


def _reap(ended: dict[int, int]) -> bool:
    """Collect children that ended, with their status; whether there are others."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return True
            ended[pid] = status
    return False


def _children() -> list[int]:
    """This process's children, also those that it inherited."""
    found, own = [], str(os.getpid())
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{name}/stat") as file:
            if file.read().rpartition(")")[2].split()[1] == own:
                found.append(int(name))
    return found


# -- the worker


def _serve(requests: int, answers: int) -> None:
    """Answer requests until their pipe is closed."""
    first = _receive(requests)
    if first is None:
        return
    sys.path[:] = first["path"]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if first["bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (first["bytes"], first["bytes"]))
    functions: dict[str, Any] = {}
    while (request := _receive(requests)) is not None:
        if "load" in request:
            answer = _load(functions, request["load"])
        elif functions[request["key"]].waits:
            answer = _call_async(functions[request["key"]], request, answers)
        else:
            answer = _call(functions[request["key"]], request)
        _send(answers, answer)


def _load(functions: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    from quiver.schemas.errors import ConfigError, QuiverError, printable
    from quiver.stages.reward.pool import calls

    key = wanted.pop("key")
    try:
        found = functions[key] = calls.load(**wanted)
    except QuiverError as error:
        return {"error": error.to_dict()}
    except BaseException as error:  # SystemExit, say
        what = f"can not be loaded: {type(error).__name__}: {printable(error)}"
        return {
            "error": ConfigError(
                f"reward function {wanted['name']}",
                what,
                next=f"see what importing {wanted['use']} does",
            ).to_dict()
        }
    takes = None if found.takes is None else sorted(found.takes)
    about = {
        "takes": takes,
        "needs": sorted(found.needs),
        "waits": found.waits,
        "fingerprint": found.fingerprint,
    }
    return {"about": about}


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

    started, finished = time.monotonic(), []

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            _send(answers, {"parts": finished[:], "done": False})
            finished.clear()

    async def work() -> None:
        beating = asyncio.ensure_future(beat())
        limits = request["rows"], request["at_once"], request["seconds"]
        tell = lambda row, part: finished.append([row, *part])  # noqa: E731
        await call_together(function, pickle.loads(request["call"]), *limits, tell)
        beating.cancel()

    global _loop  # noqa: PLW0603  one for all calls: what a function keeps open belongs to it
    _loop = _loop or asyncio.new_event_loop()
    _loop.run_until_complete(work())
    return {"parts": finished, "seconds": time.monotonic() - started, "done": True}


_loop: Any = None


def _receive(handle: int) -> Any:
    """The next request; None at the end."""
    head = _read(handle, LENGTH.size)
    return pickle.loads(_read(handle, LENGTH.unpack(head)[0])) if head else None


def _read(handle: int, size: int) -> bytearray:
    data = bytearray()
    while len(data) < size:
        piece = os.read(handle, min(size - len(data), 1 << 20))
        if not piece:
            return bytearray()
        data += piece
    return data


def _send(handle: int, answer: dict[str, Any]) -> None:
    data = json.dumps(answer).encode()
    view = memoryview(LENGTH.pack(len(data)) + data)
    while view:
        view = view[os.write(handle, view) :]


if __name__ == "__main__":
    main()
