"""Hands a command to the server that forks for it, and behaves as the command does until it ends.

    python -I -S client.py FOLDER [PYTHON OPTIONS] -m MODULE ARGUMENTS
    python -I -S client.py FOLDER -P …/answering.py CONNECTION
    python -I -S client.py FOLDER -I …/jinja_worker.py

FOLDER holds the servers' sockets and `caller`: the path of the real interpreter, and the world
that the servers were started in. A command of another world (search path, capabilities, limits,
closed streams) is run by a fresh interpreter. In another network the fork joins it; a worker, which
may be in a sandbox, is fresh there.
"""

import _signal as signal  # signal, socket and json take as long to import as Python to start
import _socket as socket
import marshal
import os
import resource
import sys

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_OF_THE_INTERPRETER = ("PYTHON", "LC_", "LANG", "LD_PRELOAD")
_WORKERS = {
    "answering.py": "quiver.stages.core.run.answering",
    "jinja_worker.py": "quiver.stages.model.chat.jinja_worker",
}
_FAILURES = os.path.join(os.path.dirname(os.path.dirname(__file__)), "faults", "started")
"""A folder on the search path of commands that fail on purpose; forks see to that themselves."""


def world() -> dict:
    """What an interpreter takes from its surroundings as it starts, and a fork cannot change."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    limits = sorted({getattr(resource, name) for name in names})
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        "search path": [folder for folder in path if folder not in ("", _FAILURES)],
        "variables": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_OF_THE_INTERPRETER) and name not in ("PYTHONPATH", "PYTHONWARNINGS")
        },
        "limits": [[limit, *resource.getrlimit(limit)] for limit in limits],
        "network": os.readlink("/proc/self/ns/net"),
        "powers": [line for line in open("/proc/self/status") if line.startswith("Cap")],
        "user": [os.geteuid(), os.getegid()],
    }


def main() -> None:
    folder, *command = sys.argv[1:]
    is_worker = "-m" not in command  # python -P answering.py CONNECTION, python -I jinja_worker.py
    at = 0 if is_worker else command.index("-m")
    with open(f"{folder}/caller", "rb") as file, open("/proc/self/oom_score_adj") as score:
        known, oom_score = marshal.load(file), score.read()
    here = world()
    limits, network = here["limits"], here["network"]
    alike = "limits" if is_worker else "network"  # what a fork takes over from its caller
    here[alike] = known["world"][alike]
    if known["world"] != here or not _all_streams_open():
        os.execv(known["python"], [f"{folder}/bin/python", *command])
    module = _WORKERS[os.path.basename(command[1])] if is_worker else command[at + 1]
    is_flow = module == "quiver" or module.startswith(("quiver.flows", "uvicorn", "prefect"))
    kind = "flows" if is_flow else os.environ.get("WARM", "stages")
    passed = [0, 1, 2]
    if is_worker:
        kind = "workers"
        passed += map(int, command[2:])
    request = {
        "python": f"{folder}/bin/python",
        "module": module,
        "arguments": command[at + 2 :],
        "options": command[: at + is_worker],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "mask": _umask(),
        "handles": passed,
        "limits": limits if is_worker else [],
        "oom_score": oom_score,
        "network": network,
    }
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{folder}/{kind}")
    text = marshal.dumps(request)
    lifeline, _ = os.pipe()  # its other end closes with this process
    passed_on = (*passed, lifeline, os.open("/proc/self/ns/net", os.O_RDONLY))
    handles = b"".join(handle.to_bytes(4, sys.byteorder) for handle in passed_on)
    streams = (socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)
    server.sendmsg([len(text).to_bytes(4, "big")], [streams])
    server.sendall(text)
    # a signal that comes before the fork is known waits for it
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    pid = int.from_bytes(_receive(server), "big")

    def forward(number: int, _: object) -> None:
        try:  # noqa: SIM105  contextlib takes a millisecond to import
            os.kill(pid, number)
        except ProcessLookupError:
            pass  # it has just ended

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    code = os.waitstatus_to_exitcode(int.from_bytes(_receive(server), "big"))
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


def _receive(server: socket.socket) -> bytes:
    answer = server.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        sys.exit("the server of warm interpreters ended")
    return answer


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _all_streams_open() -> bool:
    try:
        for number in (0, 1, 2):
            os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
