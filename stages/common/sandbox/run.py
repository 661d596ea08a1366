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
from functools import cache, partial
from pathlib import Path
from typing import BinaryIO, Literal

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError, printable
from quiver.stages.common.runtime.folders import temporary_folder
from quiver.stages.common.runtime.subprocesses import Process

from . import commands, interpreter

Isolation = Literal["full", "process"]
_START_SECONDS = 60
_POLL_SECONDS = 0.05
_PAGE = os.sysconf("SC_PAGESIZE")
# beyond the program's own limit: for its processes to be gone once they are killed
_PATIENCE_SECONDS = 90
_SHORTAGES = (
    "Resource temporarily unavailable",
    "Cannot allocate memory",
    "Too many open files",
)
# The interpreter says that it is there and waits for an answer, so the clock starts with the
# program, which is not run if the process that asked is gone. The rest is what a script expects of
# `python script.py` and -S leaves out (-S keeps installed packages out of sight).
_START = """\
def start():
    import builtins, posix, sys
    from _sitebuiltins import Quitter
    builtins.exit = builtins.quit = Quitter("exit", "Ctrl-D")
    _, path, handle = sys.argv
    sys.argv[:] = [path]
    posix.write(int(handle), b"started")
    if not posix.read(int(handle), 1):
        posix._exit(1)
    posix.close(int(handle))
    space = sys.modules["__main__"].__dict__
    del space["start"]
    space["__file__"] = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, space)
start()
"""


@dataclass(frozen=True)
class Limits:
    """What one program may use. ConfigError when a value is out of range."""

    seconds: float = 10.0
    """Wall-clock time from the start of its interpreter, and CPU time of each of its processes."""
    memory_mib: int = 512
    """Address space of each process, and resident memory of all together."""
    processes: int = 16
    """Processes and threads at once (isolation "full" only)."""
    files_mib: int = 16
    """Space in its /tmp, and the largest file that it may write."""
    open_files: int = 64
    """File descriptors of each process."""
    output_kib: int = 64
    """How much is kept of its stdout, and of its stderr; the rest is read and thrown away."""

    def __post_init__(self) -> None:
        for name, least in {
            "seconds": 0.01,
            "memory_mib": 64,
            "processes": 2,
            "files_mib": 1,
            "open_files": 16,
            "output_kib": 1,
        }.items():
            number = getattr(self, name)
            kinds = (int, float) if name == "seconds" else int
            if not isinstance(number, kinds) or not least <= number <= 1 << 20:
                whole = "" if name == "seconds" else "a whole number "
                raise ConfigError(
                    f"limits.{name}",
                    f"must be {whole}between {least} and {1 << 20}, got {number!r}",
                    next=f"correct limits.{name}",
                )


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
        raise commands.refused(f"needs Linux, this is {sys.platform}")
    place = temporary_folder() if isolation == "process" else nullcontext()
    with place as folder:
        return _launch(program, stdin, limits or Limits(), interpreter.find(python), folder)


def _launch(
    program: str,
    stdin: str,
    limits: Limits,
    python: interpreter.Interpreter,
    folder: Path | None,
) -> Finished:
    """Start a program and wait for its end, and for its output; in `folder` with isolation
    "process", in a root of its own without."""
    source = program.encode(errors="surrogatepass")
    with ExitStack() as stack:
        asker, control = map(stack.enter_context, socket.socketpair())
        files = [stack.enter_context(_sealed_file(stdin.encode(errors="surrogatepass")))]
        if folder:
            home, path = str(folder / "tmp"), str(folder / "program.py")
            os.mkdir(home)
            Path(path).write_bytes(source)
            command = commands.restrict(python, limits)
            start = partial(Process, oom_score=1000)
        else:
            home, path = "/tmp", "/program.py"
            for content in (source, commands.compile_filter()):
                files.append(stack.enter_context(_sealed_file(content)))
            # bwrap closes those that it speaks on
            files += [stack.enter_context(control.dup()) for _ in range(2)]
            handles = commands.Handles(*(file.fileno() for file in files[1:]))
            command = commands.isolate(python, limits, handles)
            start = partial(subprocess.Popen, start_new_session=True)
        process = start(
            [*command, "-c", _START, path, str(control.fileno())],
            stdin=files[0],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[file.fileno() for file in (control, *files[1:])],
            cwd=home if folder else "/",
            umask=0o077,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": home,
                "PWD": home,
                "TMPDIR": home,
                "LANG": "C.UTF-8",
                "PYTHONUTF8": "1",
                "PYTHONSAFEPATH": "1",
                "PYTHONNOUSERSITE": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONHASHSEED": "0",  # the same program on the same input does the same
            },
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        for file in (control, *files):
            file.close()
        first, ended = process.pid, None
        try:
            if not folder:
                first = _answer_bwrap(asker)
                ended = stack.enter_context(open(os.pidfd_open(first), "rb", buffering=0))
            _hear(asker, b"started")
        except (EOFError, ProcessLookupError):
            raise _not_started(process.stderr.read().decode(errors="replace")) from None
        except TimeoutError:
            raise _failed(f"it did not start within {_START_SECONDS} s") from None
        started = time.monotonic()
        asker.send(b"1")
        killed_by, stdout, stderr = _watch(process, first, ended, limits)
        seconds = time.monotonic() - started
        code = process.wait()
    if killed_by:
        code = -signal.SIGKILL
    elif not folder and code < 0:
        raise _failed("bwrap was killed")
    elif not folder and 128 < code < 128 + signal.NSIG:  # as a shell says it
        code = 128 - code
    if killed_by is None and code < 0:
        killed_by = "cpu" if -code == signal.SIGXCPU else _signal_name(-code)
    return Finished(code, stdout, stderr, killed_by, seconds)


def _sealed_file(content: bytes) -> BinaryIO:
    """A file in memory that holds `content` for good, to be read from its start."""
    file = open(os.memfd_create("quiver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b")  # noqa: SIM115
    file.write(content)
    file.seek(0)
    fcntl.fcntl(
        file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
    )
    return file


def _answer_bwrap(asker: socket.socket) -> int:
    """The pid of bwrap's child; for root it is given its users first."""
    child = json.loads(_hear(asker, b"}\n"))["child-pid"]
    if os.geteuid() == 0:
        try:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{child}/{name}").write_text(commands.USER_MAP)
        except FileNotFoundError as error:
            raise ProcessLookupError(child) from error
        except OSError as error:
            raise commands.refused(f"no user nobody of its own: {error.strerror}") from error
        asker.send(b"1")
    return child


def _hear(asker: socket.socket, ending: bytes) -> bytes:
    """What the sandbox says, up to `ending`. EOFError when it has ended instead."""
    asker.settimeout(_START_SECONDS)
    text = b""
    while not text.endswith(ending):
        character = asker.recv(1)  # what follows is for another call
        if not character:
            raise EOFError
        text += character
    return text


def _watch(
    process: subprocess.Popen, first: int, ended: BinaryIO | None, limits: Limits
) -> tuple[str | None, str, str]:
    """Read what a program prints until all of its processes are gone, and kill it when a limit is
    reached; which one, and of each output as much as is kept."""
    texts = {process.stdout: bytearray(), process.stderr: bytearray()}
    killed_by = None
    checked = started = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for file in filter(None, (*texts, ended)):
            selector.register(file, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(_POLL_SECONDS):
                chunk = os.read(key.fd, 65536) if key.fileobj in texts else b""
                if not chunk:
                    selector.unregister(key.fileobj)
                    continue
                text = texts[key.fileobj]
                text += chunk[: max(0, limits.output_kib * 1024 - len(text))]
            now = time.monotonic()
            if now - started > limits.seconds + _PATIENCE_SECONDS:
                raise _failed("its processes do not end")
            if killed_by or now - checked < _POLL_SECONDS or process.poll() is not None:
                continue
            checked = now
            if now - started > limits.seconds:
                killed_by = "time"
            elif _bytes_below(first) > limits.memory_mib << 20:
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


def _not_started(said: str) -> SecurityError | ResourceError:
    """The error of a program whose interpreter never came to run, by what the tools said."""
    said = said.strip()
    is_refusal = said.startswith(commands.TOOLS) and not said.endswith(_SHORTAGES)
    if is_refusal:
        return commands.refused(f"the system does not permit it: {printable(said)}")
    return _failed(f"it did not start: {printable(said) or 'it was killed'}")


def _failed(why: str) -> ResourceError:
    return ResourceError("sandbox", why, state="the program was not judged.", next="run again")


@cache
def check(isolation: Isolation = "full", python: str = "") -> None:
    """Run a program that does nothing. SecurityError where a layer is missing."""
    finished = run_program("print('ready')", isolation=isolation, python=python)
    if finished.stdout != "ready\n":
        raise _failed(f"a program that does nothing failed: {printable(finished.stderr[-200:])}")
