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

This process and the sandbox talk over a socket. For root, bwrap sends its child's pid and waits
until the users are mapped. Then the interpreter sends that it has started.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO, Literal

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.isolation import (
    TOOLS,
    Interpreter,
    Limits,
    compile_filter,
    failed,
    find_interpreter,
    isolate,
    map_users,
    may_mount,
    refused,
    restrict,
)
from quiver.stages.core.processes.subprocesses import Process
from quiver.stages.core.run.folders import temporary_folder

Isolation = Literal["full", "process"]
_POLL_SECONDS = 0.05
_PAGE = os.sysconf("SC_PAGESIZE")
# time beyond the program's own limit in which killed processes must disappear
_PATIENCE_SECONDS = 90
_START_SECONDS = 60
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_SHORTAGES = (
    "Resource temporarily unavailable",
    "Cannot allocate memory",
    "Too many open files",
)
# The interpreter reports its start, so a slow start of the sandbox does not count as the program's
# time. The rest restores what a script expects of `python script.py` and -S leaves out (-S hides
# installed packages).
_START = """\
def start():
    import builtins, posix, sys
    from _sitebuiltins import Quitter
    builtins.exit = builtins.quit = Quitter("exit", "Ctrl-D")
    _, path, handle = sys.argv
    sys.argv[:] = [path]
    posix.write(int(handle), b"started")
    posix.closerange(3, 1 << 16)
    space = sys.modules["__main__"].__dict__
    del space["start"]
    space["__file__"] = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, space)
start()
"""


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
        process = start_program(*texts, limits, find_interpreter(python), folder, stack)
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
        is_named = -code in set(signal.Signals)  # most real-time signals have no name
        killed_by = signal.Signals(-code).name if is_named else f"signal {-code}"
        if code == -signal.SIGXCPU:
            killed_by = "cpu"
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


@cache
def check(isolation: Isolation = "full", python: str = "") -> None:
    """Run a trivial program to check the sandbox. Raises SecurityError if a layer is missing."""
    finished = run_program("print('ready')", isolation=isolation, python=python)
    if finished.stdout != "ready\n":
        raise failed(f"a program that does nothing failed: {printable(finished.stderr[-200:])}")


# -- the start


def start_program(
    program: bytes,
    stdin: bytes,
    limits: Limits,
    python: Interpreter,
    folder: Path | None,
    stack: ExitStack,
) -> Process:
    """Start a program, and end it when `stack` closes.

    Args:
        program: Python source.
        stdin: Bytes for its standard input.
        limits: Limits of the program.
        python: Interpreter to run it with.
        folder: Empty folder to run in, for isolation "process". None: isolation "full", with its
            own root and namespaces.
        stack: Owner of the process.

    Raises:
        SecurityError: A tool is missing or refuses.
        ResourceError: The sandbox failed to start.
    """
    with ExitStack() as files:
        asker, control = map(files.enter_context, socket.socketpair())
        handed = [control]
        if folder:
            is_mapped = False
            home, path = folder / "tmp", folder / "program.py"
            home.mkdir()
            path.write_bytes(program)
            command = restrict(python, limits)
        else:
            home, path = Path("/tmp"), Path("/program.py")
            handed += map(_sealed_file, (program, compile_filter()))
            if is_mapped := may_mount():
                handed += [control.dup(), control.dup()]  # bwrap may close the descriptors it uses
            handles = [file.fileno() for file in handed[1:]]
            command = isolate(python, limits, *handles)
        for file in handed:
            files.enter_context(file)
        process = Process(
            [*command, "-c", _START, str(path), str(control.fileno())],
            stdin=files.enter_context(_sealed_file(stdin)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[file.fileno() for file in handed],
            cwd=home if folder else "/",
            umask=0o077,
            oom_score=1000,  # out of memory, the kernel kills programs before their scorer
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(home),
                "PWD": str(home),
                "TMPDIR": str(home),
                "LANG": "C.UTF-8",
                "PYTHONUTF8": "1",
                "PYTHONSAFEPATH": "1",
                "PYTHONNOUSERSITE": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "0",  # makes a program repeatable on the same input
            },
        )
        stack.callback(process.end, grace=0)  # a keeper that has only begun dies of SIGTERM
        for file in handed:
            file.close()
        asker.settimeout(_START_SECONDS)
        try:
            if is_mapped:
                map_users(json.loads(_hear(asker, b"}\n"))["child-pid"])
                asker.send(b"1")
                asker.shutdown(socket.SHUT_WR)
            _hear(asker, b"started")
        except (EOFError, ConnectionError, ProcessLookupError):
            message = process.stderr.read().decode(errors="replace").strip()
            # the interpreter never ran; the tools' messages say if the system forbids it
            if message.startswith(TOOLS) and not any(word in message for word in _SHORTAGES):
                raise refused(f"the system does not permit it: {printable(message)}") from None
            why = printable(message) or "it was killed"
            raise failed(f"it did not start: {why}") from None
        except TimeoutError:
            raise failed(f"it did not start within {_START_SECONDS} s") from None
        return process


def _sealed_file(content: bytes) -> BinaryIO:
    """Return an in-memory file with `content`, sealed against changes, open at its start."""
    handle = os.memfd_create("quiver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = os.fdopen(handle, "r+b")
    file.write(content)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def _hear(asker: socket.socket, ending: bytes) -> bytes:
    """Return what the sandbox sends, up to `ending`. Raises EOFError if it ends before that."""
    text = b""
    while not text.endswith(ending):
        character = asker.recv(1)  # one byte, because the rest is for the next call
        if not character:
            raise EOFError
        text += character
    return text
