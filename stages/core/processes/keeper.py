"""Run a command, and end all its descendants when it ends or when the requesting process dies.

    python -I -S keeper.py LIFELINE GRACE LIMITS OOM_SCORE COMMAND...

LIFELINE is the read end of a pipe that carries no data. It closes when the requesting process
closes its end or dies, even by kill -9. The command then has GRACE seconds between SIGTERM and
SIGKILL; with 0, SIGKILL comes at once. LIMITS is `RESOURCE=NUMBER,...`, as in setrlimit(2), or
empty. OOM_SCORE is the command's oom_score_adj, as in proc(5), or empty.

    requesting process     holds the other end of LIFELINE
    └── keeper             adopts every orphan below it, passes SIGTERM on, ends as the command did
        └── command        leads its own session; is killed when its keeper is
            └── ...        are killed when the command has ended, whichever session they moved to

The keeper holds the command's pipes open, so a reader sees their end only after all descendants are
gone.

This file imports the standard library alone, because it is run by its path.
"""

from __future__ import annotations

import _signal as signal  # signal itself takes 4 ms to import, for its enums
import _thread
import ctypes
import os
import resource
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_LAST_SECONDS = 3.0
_SIGNALS = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that a keeper waits for. They are blocked before it forks, so that none is lost."""


def die_with_parent() -> None:
    """Make the kernel send SIGKILL to this process when its parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))) < 0:
        raise OSError(ctypes.get_errno(), "prctl")


def kill_descendants() -> None:
    """Kill all descendants of this process, which adopts orphans, and wait until they are gone.

    Gives up after _LAST_SECONDS.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
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
        for pid in family[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.002)


def fork_kept(lifeline: int, grace: float) -> None:
    """Fork, and return in the child alone; the parent is its keeper, and ends as the child does."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans below it become its children
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        die_with_parent()
        # the keeper may have died before the death signal was set
        if os.getppid() != keeper:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        return

    def end_with_the_lifeline() -> None:
        os.read(lifeline, 1)  # returns when the other end is closed
        if grace:
            _signal_session(child, signal.SIGTERM)
            time.sleep(grace)
        _signal_session(child, signal.SIGKILL)

    _thread.start_new_thread(end_with_the_lifeline, ())
    pid = 0
    while pid != child:
        # other children are orphans, reaped without waiting
        if not pid and signal.sigwait(_SIGNALS) == signal.SIGTERM:
            _signal_session(child, signal.SIGTERM)
        pid, status = os.waitpid(-1, os.WNOHANG)
    _signal_session(child, signal.SIGKILL)
    kill_descendants()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _prctl(_PR_SET_DUMPABLE, 0)  # one core file is enough
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        os.kill(keeper, -code)
    os._exit(code)


def main() -> None:
    """Run the command under its keeper."""
    lifeline, grace, limits, oom_score, *command = sys.argv[1:]
    fork_kept(int(lifeline), float(grace))
    os.close(int(lifeline))
    for limit in filter(None, limits.split(",")):
        kind, number = map(int, limit.split("="))
        resource.setrlimit(kind, (number, number))
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write(oom_score)
    except OSError:
        pass  # the system has no such setting, or a container does not permit it
    os.execvp(command[0], command)


def _signal_session(child: int, number: int) -> None:
    for send in (os.killpg, os.kill):  # before it leads a session, the child alone
        try:
            return send(child, number)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main()
