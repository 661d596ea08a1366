"""Runs an untrusted Python program. Code that a model wrote is executed here and nowhere else.

    finished = run_program("print(input()[::-1])", stdin="abc", limits=Limits(seconds=2))
    finished.exit_code, finished.stdout      # 0, "cba\\n"

Isolation "full" (the default) uses bubblewrap. Each program gets its own interpreter, with the
standard library alone, in new user, mount, process, network, IPC and UTS namespaces:

- a read-only root in memory that shows only the interpreter's files, and an empty /tmp of limited
  size;
- no /proc, no network, and the user nobody without privileges;
- limits on time, memory, processes and files, a clean environment, and a filter of system calls.

The program and all processes that it started end together. If a tool is missing, or the system does
not permit one of these layers, SecurityError is raised and nothing is run.

Isolation "process" is for systems that permit no namespaces. It gives a session of its own, an
empty folder, a clean environment, no new privileges, and limits on time, memory and file size. It
does NOT protect:

- files: the program reads and writes all that Quiver's user may, and `/proc` of Quiver's own
  processes, including their environment variables;
- the network;
- other processes: the program may signal and trace the same user's;
- the number of processes (a fork bomb), or the disk.

Use it only inside a container or on a machine that holds nothing of value.

Needs Linux. "full" also needs bubblewrap, util-linux, libseccomp and user namespaces, for root as
for other users.
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
# time beyond the program's own limit in which killed processes must disappear
_PATIENCE_SECONDS = 90


@dataclass(frozen=True)
class Finished:
    """The outcome of a program.

    Attributes:
        exit_code: Exit code as subprocess gives it; −N if signal N ended the program.
        stdout: Kept part of its output, decoded as UTF-8 with invalid bytes replaced.
        stderr: Kept part of its error output, decoded likewise.
        killed_by: `time`, `cpu` or `memory` if a limit ended it, a signal's name if a signal did,
            else None.
        seconds: Wall-clock time it ran.
    """

    exit_code: int
    stdout: str
    stderr: str
    killed_by: str | None
    seconds: float

    @property
    def timed_out(self) -> bool:
        """True if the program exceeded its wall-clock or CPU time."""
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

    Args:
        program: Python source.
        stdin: Text for its standard input.
        limits: Limits of the program. Default: `Limits()`.
        isolation: "full" or "process"; see the module's docstring.
        python: Path of an interpreter, used with the packages of its environment. Default: this
            interpreter, with the standard library alone.

    Returns:
        The outcome, including the program's own failures.

    Raises:
        SecurityError: The system does not permit a layer of the isolation; nothing was run.
        ResourceError: The sandbox itself failed, which implies nothing about the program.
        ConfigError: `isolation` or `python` is wrong.
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
        if 128 < code < 128 + signal.NSIG:  # the shell convention for "ended by a signal"
            code = 128 - code
    if killed_by is None and code < 0:
        killed_by = "cpu" if -code == signal.SIGXCPU else _signal_name(-code)
    return Finished(code, stdout, stderr, killed_by, seconds)


def _watch(process: Process, limits: Limits) -> tuple[str | None, str, str]:
    """Read a program's output until all its processes are gone; kill it at a limit.

    Returns:
        The limit that was reached or None, and the kept parts of stdout and stderr.
    """
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
    """Return the resident bytes of the processes below `pid`; shared pages count for each."""
    pages = 0
    family = [pid]
    for process in family:  # children are appended while the list is walked
        try:
            if process != pid:
                with open(f"/proc/{process}/statm") as file:
                    pages += int(file.read().split()[1])
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    family += map(int, file.read().split())
        except OSError:
            continue  # the process ended meanwhile
    return pages * _PAGE


def _signal_name(number: int) -> str:
    """Return a signal's name such as `SIGKILL`; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@cache
def check(isolation: Isolation = "full", python: str = "") -> None:
    """Run a trivial program to check the sandbox. Raises SecurityError if a layer is missing."""
    finished = run_program("print('ready')", isolation=isolation, python=python)
    if finished.stdout != "ready\n":
        raise failed(f"a program that does nothing failed: {printable(finished.stderr[-200:])}")
