"""What the launcher does while a program runs: hear how it ended, or end it; either way nobody is
left.

The first process of the sandbox tells by lines: `started`, `ended|CODE`, `refused|LAYER|ERRNO|WHY`,
`failed|WHY`. The clock of the program starts when its interpreter is executed, so a slow start of
the sandbox is never the program's fault.
"""

from __future__ import annotations

import os
import select
import time

START_SECONDS = 60
_POLL_MILLISECONDS = 50
_SIGKILL = 9
_PAGE = os.sysconf("SC_PAGESIZE")


def until_it_ends(job: dict, child: int, news: int, lifeline: int) -> dict:
    """Wait until the first process, `child`, has told how it ended, or until a limit is reached;
    the launcher's report."""
    poll = select.poll()
    poll.register(news)
    poll.register(lifeline)
    born, started, heard = time.monotonic(), None, b""
    while True:
        ready = [handle for handle, _ in poll.poll(_POLL_MILLISECONDS)]
        now = time.monotonic()
        if news in ready:
            data = os.read(news, 4096)
            *lines, heard = (heard + data).split(b"\n")
            for line in lines:
                kind, *values = line.decode(errors="replace").split("|")
                if kind != "started":
                    return _report(kind, values, now - (started or now))
                started = now
            if not data:
                return {"failed": "the first process of the sandbox died"}
        if lifeline in ready:
            return {"failed": "the process that asked is gone"}
        if started is None:
            if now - born > START_SECONDS:
                return {"failed": f"the sandbox did not start within {START_SECONDS} s"}
        elif now - started > job["seconds"]:
            return {"exit_code": -_SIGKILL, "killed_by": "time", "seconds": now - started}
        elif sum(map(resident, descendants(child))) > job["memory_bytes"]:
            return {"exit_code": -_SIGKILL, "killed_by": "memory", "seconds": now - started}


def _report(kind: str, values: list[str], seconds: float) -> dict:
    if kind == "ended":
        return {"exit_code": int(values[0]), "killed_by": None, "seconds": seconds}
    if kind == "refused":
        return {"refused": (values[0], int(values[1]), values[2])}
    return {"failed": values[0]}


def descendants(pid: int) -> list[int]:
    """The processes below `pid`, parents first."""
    found = [pid]
    for parent in found:  # grows while it is walked
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children") as file:
                    found += map(int, file.read().split())
        except OSError:
            continue  # it ended meanwhile
    return found[1:]


def resident(pid: int) -> int:
    """Bytes of memory that a process occupies; 0 when it is gone. Pages that forks share count for
    each."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def end(child: int) -> None:
    """Kill the first process, which ends its namespace, and whoever else is below this one; wait
    for all of them."""
    os.kill(child, _SIGKILL)
    os.waitpid(child, 0)  # returns when everybody in its process namespace is gone
    while True:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, _SIGKILL)
            except ProcessLookupError:
                continue
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(
                    0.001
                )  # the kernel's list of children may miss one while others end: look again
        except ChildProcessError:
            return
