"""Runs a Python program that nobody trusts: what a model wrote is executed here and nowhere else.

    finished = run_program("print(input()[::-1])", stdin="abc", limits=Limits(seconds=2))
    finished.exit_code, finished.stdout      # 0, "cba\\n"

With isolation "full" (the default) each program gets an interpreter of its own, with the standard
library alone, in new user, mount, process, network, IPC and UTS namespaces: a read-only root in
memory with nothing of the host but the interpreter's files, an empty /tmp of limited size, no
/proc, no network, the user nobody without privileges, limits on time, memory, processes and files,
a clean environment, and (x86_64, aarch64) a filter of system calls. It ends with everything that it
started. Where the system does not permit a layer, SecurityError names it, and nothing is run.

Isolation "process" is for systems that permit no namespaces. It gives a session of its own, an
empty folder, a clean environment, no new privileges, and limits on time, memory and file size. It
does NOT protect: files (the program reads and writes whatever the user who runs Quiver may, `/proc`
of Quiver's own processes with their environment included), the network, other processes (it may
signal and trace those of the same user), the number of processes (a fork bomb), the disk. Whoever
chooses it should do so inside a container or a machine that holds nothing of worth.

Needs Linux; "full" needs Linux 5.12 and user namespaces, for root and for other users alike.
"""

from __future__ import annotations

import errno
import marshal
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError, printable
from quiver.stages.common.runtime.folders import temporary_folder
from quiver.stages.common.runtime.subprocesses import Process

from . import interpreter

Isolation = Literal["full", "process"]
_LAUNCHER = Path(__file__).with_name("launcher")
# beyond the program's own limit; the launcher gives up by itself before that
_PATIENCE_SECONDS = 90
# What a script expects of `python script.py` and -S leaves out (-S keeps installed packages out of
# sight); no name is left behind.
_START = """\
def start():
    import builtins, sys
    from _sitebuiltins import Quitter
    builtins.exit = builtins.quit = Quitter("exit", "Ctrl-D")
    del sys.argv[0]  # "-c"
    (path,) = sys.argv
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
        raise _refused("Linux", f"this is {sys.platform}")
    limits = limits or Limits()
    # with "full" the program lives in a root of its own
    place = nullcontext("")
    if isolation == "process":
        place = temporary_folder()
    with place as folder:
        return _launch(_job(program, stdin, limits, python, str(folder)), limits)


def _job(program: str, stdin: str, limits: Limits, python: str, folder: str) -> dict[str, Any]:
    """What the launcher is told; `folder` is empty for isolation "full"."""
    command, paths = interpreter.find(python)
    home = f"{folder}/tmp"
    if folder:
        os.mkdir(home)
    return {
        "full": not folder,
        "command": [*command, "-c", _START],
        "paths": paths,
        "environment": {
            "PATH": "/usr/bin:/bin",
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "PYTHONUTF8": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONNOUSERSITE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",  # the same program on the same input does the same
        },
        "folder": folder,
        "cwd": home,
        "program": program.encode(errors="surrogatepass"),
        "stdin": stdin.encode(errors="surrogatepass"),
        "cpu_seconds": math.ceil(limits.seconds),
        **asdict(limits),
    }


def _launch(job: dict[str, Any], limits: Limits) -> Finished:
    """Start the launcher with a job and wait for its report, and for the program's output."""
    report_read, report_write = os.pipe()
    with tempfile.TemporaryFile() as file, open(report_read, "rb", buffering=0) as pipe:
        try:
            file.write(marshal.dumps(job))
            file.seek(0)
            launcher = Process(
                [interpreter.find().command[0], "-I", "-S", str(_LAUNCHER), str(report_write)],
                is_keeper=True,
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(report_write,),
                cwd="/",
                env={},
            )
        finally:
            os.close(report_write)
        try:
            pipes = [pipe, launcher.stdout, launcher.stderr]
            answer, stdout, stderr = _read(pipes, limits)
        finally:
            code = launcher.end(grace=0)
    stderr_text = stderr.decode(errors="replace")
    if not answer:
        raise _failed(f"its launcher died with exit code {code}: {printable(stderr_text)}")
    report = marshal.loads(answer)
    if "refused" in report:
        layer, number = report["refused"]
        why = os.strerror(int(number))
        if int(number) == errno.ENOSPC:
            why = "none are left, or none allowed, by /proc/sys/user"
        raise _refused(layer, why)
    if "failed" in report:
        raise _failed(printable(report["failed"][0]))
    code = int(report["ended"][0])
    killed_by = report["killed_by"]
    if killed_by is None and code < 0:
        killed_by = "cpu" if -code == signal.SIGXCPU else _signal_name(-code)
    return Finished(
        code, stdout.decode(errors="replace"), stderr_text, killed_by, report["seconds"]
    )


def _signal_name(number: int) -> str:
    """`SIGKILL`; the real-time signals between the first and the last have no name."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _read(pipes: list[BinaryIO], limits: Limits) -> list[bytes]:
    """All that comes from the pipes until each is closed, of each at most as much as is kept."""
    texts = {pipe: bytearray() for pipe in pipes}
    deadline = time.monotonic() + limits.seconds + _PATIENCE_SECONDS
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(deadline - time.monotonic())
            if not ready:
                raise _failed("its launcher hangs")
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    selector.unregister(key.fileobj)
                text = texts[key.fileobj]
                text += chunk[: max(0, limits.output_kib * 1024 - len(text))]
    return [bytes(text) for text in texts.values()]


def _failed(why: str) -> ResourceError:
    return ResourceError("sandbox", why, state="the program was not judged.", next="run again")


def _refused(layer: str, why: str) -> SecurityError:
    return SecurityError(
        "sandbox",
        f'the system does not permit the layer {layer}: {printable(why)}; isolation = "process" '
        "asks for less",
        state="no program was run.",
        next="permit user namespaces (sysctl user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in a "
        "container its seccomp profile), use a remote sandbox, or set isolation = "
        '"process" in arguments, which protects neither files nor network',
    )


@cache
def check(isolation: Isolation = "full", python: str = "") -> None:
    """Run a program that does nothing. SecurityError where a layer is missing."""
    finished = run_program("print('ready')", isolation=isolation, python=python)
    if finished.stdout != "ready\n":
        raise _failed(f"a program that does nothing failed: {printable(finished.stderr[-200:])}")
