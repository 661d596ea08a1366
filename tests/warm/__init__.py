"""A stand-in for the interpreter that starts Quiver's commands and stages as forks of a process which
has imported what they need: importing Prefect or transformers costs more processor time than most
of what the tests run.

    start_servers()        # before processes of pytest that are to share them
    use_warm_python()      # sys.executable is the stand-in, here and in all that is started by it
    REAL_PYTHON            # a fresh interpreter, for tests about signals, streams, memory, imports

`sys.executable -m quiver.…`, a test's own `…_checks`, Prefect's commands and vLLM's server are handed
to a server (`server.py`), which forks; so are workers with a user's code and those that render chat
templates, with the limits of their memory. Everything else is run by the real interpreter, also the
flows that a Prefect worker starts, which watch their parent.
The fork gets the caller's arguments, environment, working folder, standard streams and network; its
exit code becomes the stand-in's, and it is killed when the stand-in is. A caller whose search path,
capabilities or limits differ from the server's gets a fresh interpreter, and so does a worker in
another network.

What differs from a fresh interpreter: /proc shows the server's environment and command line, the
parent is the server, the fork leads a session of its own, and the peak of memory includes what the
server imported.
"""

import atexit
import marshal
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quiver.stages.core.run.stage_process import ENVIRONMENT

from .client import world

REAL_PYTHON = sys.executable
_HERE = Path(__file__).parent
# bash, whose exec can name the stand-in as the program that runs: sys.executable is its path then
_STAND_IN = """#!/bin/bash
case "$* " in
"-m torch.distributed.run "*" -m quiver "* | "-u -m quiver "* | \\
"-m quiver.flows.cli.main "* | "-P -m quiver.flows.cli.main "* | "-m quiver.stages "* | "-u -P -m quiver.stages "* | \\
"-P -m quiver.stages."* | "-m tests.finished "* | "-m tests.stages."*_checks\\ * | \\
"-m vllm.entrypoints.openai.api_server "* | "-m uvicorn "* | "-m prefect "* | "-P -m prefect "* | \\
"-P "*/run/answering.py\\ * | "-I /"*/chat/jinja_worker.py\\ *)
    exec {real} -I -S {client} {folder} "$@" ;;
*) exec -a "$0" {real} "$@" ;;
esac
"""
_PROGRAM = """#!/bin/sh
exec {python} -P -m {module} "$@"
"""
_FOLDER = "QUIVER_TEST_WARM"
"""The variable that names the folder of the servers to the processes that share them."""
_servers: list[subprocess.Popen] = []


def use_warm_python() -> None:
    """Make sys.executable the stand-in until this process ends."""
    if _FOLDER not in os.environ:
        start_servers()
    sys.executable = str(Path(os.environ[_FOLDER]) / "bin" / "python")


def seconds_of_forks() -> float:
    """Processor seconds of the forks that this process of pytest, or what it started, asked for;
    of those that have ended."""
    if _FOLDER not in os.environ:
        return 0.0
    folder = Path(os.environ[_FOLDER])
    files = folder.glob(f"*.spent.{os.environ.get('PYTEST_XDIST_WORKER', '')}")
    return sum(float(file.read_text()) for file in files)


def start_servers() -> None:
    """Start the servers, which end with this process and import nothing before their first
    command."""
    folder = Path(tempfile.mkdtemp(prefix="quiver-warm."))
    atexit.register(_end, folder, os.getpid())
    programs = folder / "bin"  # a virtual environment with the libraries of the real one
    programs.mkdir()
    for program in Path(REAL_PYTHON).parent.iterdir():
        if not program.name.startswith(("python", "quiver", "prefect")):
            (programs / program.name).symlink_to(program)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    words = {"real": REAL_PYTHON, "client": _HERE / "client.py", "folder": folder}
    words["python"] = programs / "python"
    quoted = {name: shlex.quote(str(value)) for name, value in words.items()}
    texts = {"python": _STAND_IN.format(**quoted)}
    for name, module in (("quiver", "quiver.flows.cli.main"), ("prefect", "prefect")):
        texts[name] = _PROGRAM.format(**quoted, module=module)
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    known = {"python": REAL_PYTHON, "world": world()}
    (folder / "caller").write_bytes(marshal.dumps(known))
    for kind in ("flows", "stages", "vllm", "workers"):
        _start_server(folder, kind)
    os.environ[_FOLDER] = str(folder)


def _start_server(folder: Path, kind: str) -> None:
    command = [REAL_PYTHON, str(_HERE / "server.py"), kind, str(folder)]
    # what Prefect reads as it is imported comes with each command
    variables = {name: value for name, value in os.environ.items() if name[:8] != "PREFECT_"}
    if kind != "flows":
        variables |= ENVIRONMENT
    # pipes: a fork's own streams take their place, and Python has asked already whether they can seek
    server = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=variables,
    )
    _servers.append(server)
    while not (folder / kind).exists():
        assert server.poll() is None, server.stdout.read()
        time.sleep(0.005)


def _end(folder: Path, pid: int) -> None:
    if os.getpid() != pid:
        return  # a fork that ends
    for server in _servers:
        server.stdin.close()
        server.wait()
    shutil.rmtree(folder, ignore_errors=True)
