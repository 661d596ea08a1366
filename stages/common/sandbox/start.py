"""Starts a program in its sandbox: up to the moment at which its interpreter is there.

The process that asks and the sandbox speak by a socket. For root, bwrap says its child's pid on it
and waits until its users are mapped; then the interpreter says that it has started.
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
# The interpreter says that it is there: a slow start of the sandbox is never the program's fault.
# The rest is what a script expects of `python script.py` and -S leaves out (-S keeps installed
# packages out of sight).
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
    """Start a program that ends with `stack`: in an empty `folder`, or without one in a root and
    namespaces of its own. SecurityError: a tool is missing or refuses. ResourceError: it failed."""
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
            if is_mapped := os.geteuid() == 0:
                handed += [control.dup(), control.dup()]  # bwrap may close those that it uses
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
            oom_score=1000,  # programs go before the process that scores them
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
                "PYTHONHASHSEED": "0",  # the same program on the same input does the same
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
    """A file in memory that holds `content` for good, to be read from its start."""
    handle = os.memfd_create("quiver", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = os.fdopen(handle, "r+b")
    file.write(content)
    file.seek(0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
    return file


def _hear(asker: socket.socket, ending: bytes) -> bytes:
    """What the sandbox says, up to `ending`. EOFError if it has ended instead."""
    text = b""
    while not text.endswith(ending):
        character = asker.recv(1)  # what follows is for another call
        if not character:
            raise EOFError
        text += character
    return text


def _not_started(stderr: str) -> SecurityError | ResourceError:
    """The error of a program whose interpreter never came to run, by what the tools said."""
    stderr = stderr.strip()
    is_shortage = any(shortage in stderr for shortage in _SHORTAGES)
    if stderr.startswith(commands.TOOLS) and not is_shortage:
        return refused(f"the system does not permit it: {printable(stderr)}")
    return failed(f"it did not start: {printable(stderr) or 'it was killed'}")
