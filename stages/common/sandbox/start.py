"""Starts a program in its sandbox and waits until its interpreter runs.

This process and the sandbox talk over a socket. For root, bwrap sends its child's pid and waits
until the users are mapped. Then the interpreter sends that it has started.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from quiver.schemas.errors import ResourceError, SecurityError, printable
from quiver.stages.common.runtime.subprocesses import Process

from . import commands
from .errors import failed, refused
from .interpreter import Interpreter
from .limits import Limits

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
            command = commands.restrict(python, limits)
        else:
            home, path = Path("/tmp"), Path("/program.py")
            handed += map(_sealed_file, (program, commands.compile_filter()))
            if is_mapped := commands.may_mount():
                handed += [control.dup(), control.dup()]  # bwrap may close the descriptors it uses
            handles = [file.fileno() for file in handed[1:]]
            command = commands.isolate(python, limits, *handles)
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
                commands.map_users(json.loads(_hear(asker, b"}\n"))["child-pid"])
                asker.send(b"1")
                asker.shutdown(socket.SHUT_WR)
            _hear(asker, b"started")
        except (EOFError, ConnectionError, ProcessLookupError):
            raise _not_started(process.stderr.read().decode(errors="replace")) from None
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


def _not_started(stderr: str) -> SecurityError | ResourceError:
    """Return the error for an interpreter that never ran, judged by the tools' messages."""
    stderr = stderr.strip()
    is_shortage = any(shortage in stderr for shortage in _SHORTAGES)
    if stderr.startswith(commands.TOOLS) and not is_shortage:
        return refused(f"the system does not permit it: {printable(stderr)}")
    return failed(f"it did not start: {printable(stderr) or 'it was killed'}")
