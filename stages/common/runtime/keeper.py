"""Runs a command and, when it ends, or when whoever asked for it does, ends all that it started.

    python -I -S keeper.py LIFELINE GRACE LIMITS OOM_SCORE COMMAND...

LIFELINE is the read end of a pipe to which nobody writes. It closes when the asking process closes
its end, or dies, by kill -9 too. The command then has GRACE seconds between SIGTERM and SIGKILL (at
0, SIGKILL comes at once). LIMITS is `RESOURCE=NUMBER,...`, as of setrlimit(2), or empty; OOM_SCORE
is the command's oom_score_adj, as of proc(5), or empty.

    whoever asked          holds the other end of LIFELINE
    └── keeper             adopts every orphan below it, passes SIGTERM on, ends as the command did
        └── command        leads a session of its own; is killed when its keeper is
            └── ...        are killed when the command has ended, whatever session they moved to

The keeper holds the command's pipes open, so they reach their end only when all of that is gone.

This file imports the standard library alone: it is run by its path.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_SIGKILL = 9
_LAST_SECONDS = 3.0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """SIGKILL when the parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, _SIGKILL)


def set_oom_score(score: int) -> None:
    """Let the kernel kill this process, and what it starts, before those of a lower score when
    memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(str(score))
    except OSError:
        pass  # a system without it has no such order, and a container may not let us


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))) < 0:
        raise OSError(ctypes.get_errno(), "prctl")


def kill_descendants(seconds: float = float("inf")) -> None:
    """Kill all that descends from this process, which adopts orphans, and wait, at most so long,
    until they are gone."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _descendants():
            try:
                os.kill(pid, _SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(parent, []).append(int(name))
    family = [os.getpid()]
    for pid in family:  # grows while it is walked
        family += children.get(pid, [])
    return family[1:]


def main() -> None:
    """Start the command, keep it, and end as it does."""
    lifeline, grace, limits, oom_score, *command = sys.argv[1:]
    adopt_orphans()
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(int(lifeline))
        os.setsid()
        die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        for limit in filter(None, limits.split(",")):
            kind, number = map(int, limit.split("="))
            resource.setrlimit(kind, (number, number))
        if oom_score:
            set_oom_score(int(oom_score))
        os.execvp(command[0], command)
    code = os.waitstatus_to_exitcode(_keep(child, int(lifeline), float(grace)))
    if code < 0:
        import signal

        _prctl(_PR_SET_DUMPABLE, 0)  # one core file is enough
        if code != -_SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(keeper, -code)
    os._exit(code)


def _keep(child: int, lifeline: int, grace: float) -> int:
    """Wait for the end of the child or of the lifeline, then end all that is left; the child's
    status."""
    import select
    import signal  # slow to import, and the command runs meanwhile

    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    poll = select.poll()  # select() refuses handles beyond 1023, and these have the asker's numbers
    poll.register(lifeline)
    poll.register(awake, select.POLLIN)
    status = _collect(child)
    while status is None and lifeline not in dict(poll.poll()):
        if signal.SIGTERM in os.read(awake, 4096):
            _signal_session(child, signal.SIGTERM)
        status = _collect(child)
    if status is None and grace:
        _signal_session(child, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while status is None and time.monotonic() < deadline:
            time.sleep(0.02)
            status = _collect(child)
    _signal_session(child, _SIGKILL)
    if status is None:
        os.kill(child, _SIGKILL)
        status = os.waitpid(child, 0)[1]
    kill_descendants(_LAST_SECONDS)
    return status


def _collect(child: int) -> int | None:
    """Wait for what has ended already; the child's status, None while it runs."""
    pid = -1
    while pid not in (0, child):
        pid, status = os.waitpid(-1, os.WNOHANG)
    return status if pid else None


def _signal_session(child: int, number: int) -> None:
    try:
        os.killpg(child, number)
    except ProcessLookupError:  # all of it has ended, or the child leads none yet
        return


if __name__ == "__main__":
    main()
