"""What the launcher does while a program runs: hear how it ended, or end it; either way nobody is
left.

The first process of the sandbox tells by lines: `started`, `ended|CODE`, `refused|LAYER|ERRNO`,
`failed|WHY`. The launcher's report says the last of them as a dict, `{"ended": [CODE], …}`, with
`seconds` and `killed_by`. The clock of the program starts when its interpreter is executed, so a
slow start of the sandbox is never the program's fault.
"""

from __future__ import annotations

import os
import select
import time

import keeper

START_SECONDS = 60
_POLL_MILLISECONDS = 50
_SIGKILL = 9
_PAGE = os.sysconf("SC_PAGESIZE")


def until_it_ends(job: dict, first: int, news: int, lifeline: int) -> dict:
    """Wait until the first process has told how the program ended, or until a limit is reached; the
    launcher's report."""
    poll = select.poll()
    poll.register(news)
    poll.register(lifeline)
    launched = time.monotonic()
    started = None
    unfinished = b""
    while True:
        ready = [handle for handle, _ in poll.poll(_POLL_MILLISECONDS)]
        now = time.monotonic()
        if news in ready:
            chunk = os.read(news, 4096)
            *lines, unfinished = (unfinished + chunk).split(b"\n")
            for line in lines:
                kind, *details = line.decode(errors="replace").split("|")
                if kind != "started":
                    return {kind: details, "seconds": now - (started or now), "killed_by": None}
                started = now
            if not chunk:
                return {"failed": ["the first process of the sandbox died"]}
        if lifeline in ready:
            return {"failed": ["the process that asked is gone"]}
        if started is None:
            if now - launched > START_SECONDS:
                return {"failed": [f"the sandbox did not start within {START_SECONDS} s"]}
        elif now - started > job["seconds"]:
            return {"ended": [-_SIGKILL], "seconds": now - started, "killed_by": "time"}
        elif _bytes_below(first) > job["memory_mib"] << 20:
            return {"ended": [-_SIGKILL], "seconds": now - started, "killed_by": "memory"}


def _bytes_below(pid: int) -> int:
    """Resident memory of the processes below `pid`; pages that forks share count for each.

    `keeper` looks at all processes to find those below one; that would be too slow for each turn.
    """
    pages = 0
    family = [pid]
    for process in family:  # grows while it is walked
        try:
            if process != pid:
                with open(f"/proc/{process}/statm") as file:
                    pages += int(file.read().split()[1])
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    family += map(int, file.read().split())
        except OSError:
            continue  # it ended meanwhile
    return pages * _PAGE


def end(first: int) -> None:
    """Kill the first process, which ends its namespace, and whoever else is below this one; wait
    for all of them."""
    os.kill(first, _SIGKILL)
    os.waitpid(first, 0)  # returns when everybody in its process namespace is gone
    keeper.kill_descendants()
