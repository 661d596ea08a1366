"""Runs a Python program that nobody trusts: what a model wrote is executed here and nowhere else.

    finished = run_program("print(input()[::-1])", stdin="abc", limits=Limits(seconds=2))
    finished.exit_code, finished.stdout      # 0, "cba\\n"

With isolation "full" (the default) bubblewrap gives each program an interpreter of its own, with
the standard library alone, in new user, mount, process, network, IPC and UTS namespaces: a
read-only root in memory with nothing of the host but the interpreter's files, an empty /tmp of
limited size, no /proc, no network, the user nobody without privileges, limits on time, memory,
processes and files, a clean environment, and a filter of system calls. It ends with everything that
it started. If a tool is missing, or the system does not permit what it does, SecurityError says so,
and nothing is run.

Isolation "process" is for systems that permit no namespaces. It gives a session of its own, an
empty folder, a clean environment, no new privileges, and limits on time, memory and file size. It
does NOT protect: files (the program reads and writes whatever the user who runs Quiver may, `/proc`
of Quiver's own processes with their environment included), the network, other processes (it may
signal and trace those of the same user), the number of processes (a fork bomb), the disk. Whoever
chooses it should do so inside a container or a machine that holds nothing of worth.

Needs Linux; "full" needs bubblewrap, util-linux, libseccomp and user namespaces, for root and for
other users alike.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Literal

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.runtime.folders import temporary_folder
from quiver.stages.common.runtime.subprocesses import Process

from . import interpreter
from .errors import failed, refused
from .limits import Limits
from .start import start_program

Isolation = Literal["full", "process"]
_POLL_SECONDS = 0.05
_PAGE = os.sysconf("SC_PAGESIZE")
# beyond the program's own limit: for its processes to be gone once they are killed
_PATIENCE_SECONDS = 90


@dataclass(frozen=True)
class Finished:
    """How a program ended.

    `exit_code`: as of subprocess, −N when signal N ended it. `killed_by`: `time`, `cpu` or `memory`
    when a limit ended it, the name of a signal when one did, else None. `stdout`, `stderr`: what is
    kept of them, decoded as UTF-8, invalid bytes replaced.
    """

    exit_code: int
    stdout: str
    stderr: str
    killed_by: str | None
    seconds: float

    @property
    def timed_out(self) -> bool:
        """Whether its time was up: by the clock, or of the processor."""
        return self.killed_by in ("time", "cpu")


def run_program(
    program: str,
    *,
    stdin: str = "",
    limits: Limits | None = None,
    isolation: Isolation = "full",
    python: str = "",
) -> Finished:
    """Run Python source as `__main__` and wait for it. Safe to call from several threads.

    `python`: another interpreter, with what is installed in its environment; empty: this one, with
    the standard library alone. What the program does wrong is in the result. SecurityError: the
    system does not permit a layer of the isolation, nothing was run. ResourceError: the sandbox
    itself failed, which says nothing about the program.
    """
    if isolation not in ("full", "process"):
        raise ConfigError(
            "isolation",
            f"must be full or process, got {printable(repr(isolation))}",
            next="correct isolation",
        )
    if not sys.platform.startswith("linux"):
        raise refused(f"needs Linux, this is {sys.platform}")
    place = temporary_folder() if isolation == "process" else nullcontext()
    limits = limits or Limits()
    texts = [text.encode(errors="surrogatepass") for text in (program, stdin)]
    with place as folder, ExitStack() as stack:
        process = start_program(*texts, limits, interpreter.find(python), folder, stack)
        begun = time.monotonic()
        killed_by, stdout, stderr = _watch(process, limits)
        seconds = time.monotonic() - begun
        code = process.wait()
    if killed_by:
        code = -signal.SIGKILL
    elif isolation == "full":
        if code < 0:
            raise failed("bwrap was killed")
        if 128 < code < 128 + signal.NSIG:  # as a shell says that a signal ended it
            code = 128 - code
    if killed_by is None and code < 0:
        killed_by = "cpu" if -code == signal.SIGXCPU else _signal_name(-code)
    return Finished(code, stdout, stderr, killed_by, seconds)


def _watch(process: Process, limits: Limits) -> tuple[str | None, str, str]:
    """Read what a program prints until all of its processes are gone, and kill it when a limit is
    reached; which one, and of each output as much as is kept."""
    texts = {process.stdout: bytearray(), process.stderr: bytearray()}
    killed_by = None
    checked = begun = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for file in texts:
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_POLL_SECONDS):
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                text = texts[key.fileobj]
                text += chunk[: max(0, limits.output_kib * 1024 - len(text))]
            now = time.monotonic()
            if now - begun > limits.seconds + _PATIENCE_SECONDS:
                raise failed("its processes do not end")
            if killed_by or now - checked < _POLL_SECONDS or process.poll() is not None:
                continue
            checked = now
            if now - begun > limits.seconds:
                killed_by = "time"
            elif _bytes_below(process.pid) > limits.memory_mib << 20:
                killed_by = "memory"
            if killed_by:
                process.kill()
    stdout, stderr = (text.decode(errors="replace") for text in texts.values())
    return killed_by, stdout, stderr


def _bytes_below(pid: int) -> int:
    """Resident memory of the processes below `pid`; pages that forks share count for each."""
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


def _signal_name(number: int) -> str:
    """`SIGKILL`; the real-time signals between the first and the last have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@cache
def check(isolation: Isolation = "full", python: str = "") -> None:
    """Run a program that does nothing. SecurityError where a layer is missing."""
    finished = run_program("print('ready')", isolation=isolation, python=python)
    if finished.stdout != "ready\n":
        raise failed(f"a program that does nothing failed: {printable(finished.stderr[-200:])}")
