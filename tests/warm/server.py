"""Forks for the commands that `client.py` hands over, after importing what they need.

    python server.py KIND FOLDER

It imports when the first command comes, and ends when its standard input does. The processor seconds
of the forks that ended are in FOLDER/KIND.spent.ASKER, by the process of pytest that asked for them.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.abc
import importlib.machinery
import logging
import marshal
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter

_STAGES = (
    "torch",
    "accelerate",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.auto.tokenization_auto",
    "quiver.stages.prompt.stage",
    "quiver.stages.generate.stage",
    "quiver.stages.generate.engines.transformers",
    "quiver.stages.reward.stage",
    "quiver.stages.logprobs.stage",
    "quiver.stages.optimize.stage",
    "quiver.stages.optimize.results",
    "quiver.stages.optimize.rollouts",
    "quiver.stages.optimize.trainer",
    "quiver.stages.evaluate.stage",
    "quiver.stages.core.ranks",
    "quiver.stages.core.run.runner",
    "quiver.stages.optimize.accelerator",
    "quiver.stages.optimize.resume",
    "quiver.stages.prompt.rows",
    "pandas",
    "pyarrow.pandas_compat",
)
IMPORTS = {
    "flows": (
        "prefect.main",
        "prefect.server.api.server",
        "prefect.cli.server",
        "prefect.cli._server_utils",
        "uvicorn.main",
        "quiver.flows.cli.main",
        "quiver.flows.post_train",
        "quiver.flows.nightly",
        "quiver.flows.rerun",
        "quiver.flows.dry_run",
        "quiver.flows.cli.embedded",
        "quiver.flows.prefect_server",
        "quiver.flows.cli.summary",
        "quiver.flows.look.gather",
        "quiver.flows.look.stage",
        "pandas",
        "pyarrow.pandas_compat",
        "fastapi",
        "graphviz",
    ),
    "stages": _STAGES,
    "vllm": (
        *_STAGES,
        "vllm",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.llm_engine",
        "vllm.entrypoints.openai.api_server",
    ),
    "workers": (
        "multiprocessing.connection",
        "quiver.stages.core.run.answering",
        "quiver.stages.turns.environment_process",
        "quiver.stages.reward.pool.calls",
        "quiver.stages.core.run.user_process",
        "quiver.stages.model.chat.jinja_worker",
    ),
}


_FAILURES = os.path.join(os.path.dirname(__file__), "../faults/started/sitecustomize.py")


class Server:
    """Listens on the socket of one kind of command. Each command's connection stays open while its
    fork runs."""

    def __init__(self, kind: str, folder: str) -> None:
        self._kind = kind
        self._folder = folder
        self._is_warm = False
        self._callers: dict[int, socket.socket] = {}
        """Connections by the fork that serves them."""
        self._askers: dict[int, str] = {}
        """The process of pytest by the fork that it, or what it started, asked for."""
        self._spent: Counter[str] = Counter()
        """Processor seconds of the forks that ended, by process of pytest."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/{kind}")
        self._listener.listen(64)
        self._woken, self._wake = os.pipe()  # written to when a fork ends
        os.set_blocking(self._wake, False)
        self._selector = selectors.DefaultSelector()
        for source in (sys.stdin.fileno(), self._listener, self._woken):
            self._selector.register(source, selectors.EVENT_READ)

    def serve(self) -> dict:
        """Fork for every command until standard input ends; returns, in each fork, its request."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == sys.stdin.fileno():
                    for fork in self._callers:
                        os.kill(fork, signal.SIGKILL)
                    os._exit(0)
                elif key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._collect()
                elif key.data in self._callers:  # its caller is gone
                    self._selector.unregister(key.fileobj)
                    if self._kind == "flows":  # the keeper of a stage sees it, too
                        os.kill(key.data, signal.SIGKILL)

    def _accept(self) -> dict | None:
        """Take a command; returns its request in the fork that will run it."""
        if not self._is_warm:
            self._warm()
        connection = self._listener.accept()[0]
        length, handles, *_ = socket.recv_fds(connection, 4, 6)
        size = int.from_bytes(length, "big")
        text = connection.recv(size, socket.MSG_WAITALL) if handles else b""
        if not handles or len(text) < size:  # the caller was killed while it asked
            for handle in handles:
                os.close(handle)
            connection.close()
            return None
        *streams, lifeline, network = handles
        request = marshal.loads(text)
        fork = os.fork()
        if fork == 0:
            self._leave_to_the_parent(connection)
            _join(network, request["network"])
            lowest = max(request["handles"]) + 1
            above = [fcntl.fcntl(each, fcntl.F_DUPFD, lowest) for each in (*streams, lifeline)]
            for handle in (*streams, lifeline):
                os.close(handle)
            for number, stream in zip(request["handles"], above, strict=False):
                os.dup2(stream, number)
                os.close(stream)
            if self._kind != "flows":
                # a stage's real keeper sees the stand-in alone, and cannot end what the stage
                # leaves behind
                from quiver.stages.core.processes import keeper

                keeper.die_with_parent()
                keeper.fork_kept(above[-1], 0)
            os.close(above[-1])
            return request
        for handle in handles:
            os.close(handle)
        self._callers[fork] = connection
        self._askers[fork] = request["environment"].get("PYTEST_XDIST_WORKER", "")
        self._selector.register(connection, selectors.EVENT_READ, fork)
        _tell(connection, fork)
        return None

    def _warm(self) -> None:
        gc.set_threshold(100_000, 50, 100)  # what is imported stays; forks begin with this too
        for name in IMPORTS[self._kind]:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._is_warm = True

    def _leave_to_the_parent(self, connection: socket.socket) -> None:
        """In a fork: close what is the server's, and take signals as an interpreter does."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._selector.close()
        for each in (self._listener, connection, *self._callers.values()):
            each.close()
        for pipe in (self._woken, self._wake):
            os.close(pipe)

    def _collect(self) -> None:
        """Tell the callers of forks that ended how they did."""
        while self._callers:
            fork, status, usage = os.wait4(-1, os.WNOHANG)
            if not fork:
                return
            self._add(self._askers.pop(fork), usage.ru_utime + usage.ru_stime)
            connection = self._callers.pop(fork)
            if connection in self._selector.get_map():
                self._selector.unregister(connection)
            _tell(connection, status)
            connection.close()

    def _add(self, asker: str, seconds: float) -> None:
        """Add to what the forks of a process of pytest spent, in a file that it reads."""
        self._spent[asker] += seconds
        path = f"{self._folder}/{self._kind}.spent.{asker}"
        with open(f"{path}.new", "w") as file:
            file.write(str(self._spent[asker]))
        os.replace(f"{path}.new", path)


def _tell(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the caller was killed, and so is the fork
        connection.sendall(number.to_bytes(4, "big"))


def _join(handle: int, name: str) -> None:
    """See the network that the caller sees."""
    if os.readlink("/proc/self/ns/net") != name:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, 0):
            raise OSError(ctypes.get_errno(), "the caller's network cannot be joined")
    os.close(handle)


class _Restored(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Brings Prefect back at its first import, with settings and logs as the environment has them
    then, as a fresh interpreter would."""

    def __init__(self) -> None:
        self._modules = {
            name: module for name, module in sys.modules.items() if name.split(".")[0] == "prefect"
        }
        for name in self._modules:
            del sys.modules[name]

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name != "prefect":
            return None
        self._spec = self._modules["prefect"].__spec__
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: object) -> object:
        return self._modules["prefect"]

    def exec_module(self, module: object) -> None:
        sys.meta_path.remove(self)  # now, since runpy asks for the spec twice
        module.__spec__ = self._spec
        sys.modules.update(self._modules)
        sys.modules["prefect.context"].refresh_global_settings_context()
        logs = sys.modules["prefect.logging.configuration"]
        logs.PROCESS_LOGGING_CONFIG.clear()
        logs.setup_logging()


def run(request: dict) -> None:
    """Be the command's process."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.umask(request["mask"])
    os.sched_setaffinity(0, request["cores"])
    with open("/proc/self/oom_score_adj", "w") as score:
        score.write(request["oom_score"])
    for limit, *numbers in request["limits"]:
        resource.setrlimit(limit, tuple(numbers))
    time.tzset()
    tempfile.tempdir = None
    for stream in (sys.stdout, sys.stderr):
        at_once = "-u" in request["options"] or stream is sys.stderr
        stream.reconfigure(line_buffering=at_once or stream.isatty(), write_through=at_once)
    if not {"-I", "-P"}.intersection(request["options"]):
        sys.path.insert(0, request["folder"])
    module = request["module"]
    sys.modules.pop(module if module.count(".") > 1 else f"{module}.__main__", None)
    if "prefect" in sys.modules:
        sys.meta_path.insert(0, _Restored())
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            # as they are before Prefect sets them up; what our modules set up as they are imported stays
            if isinstance(logger, logging.Logger) and logger.name.split(".")[0] != "quiver":
                logger.handlers.clear()
                logger.setLevel(logging.WARNING if logger is logging.root else logging.NOTSET)
                logger.propagate = True
    sys.argv = [module, *request["arguments"]]
    sys.executable = request["python"]
    if "QUIVER_TEST_FAIL" in os.environ:
        runpy.run_path(_FAILURES)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def leave(code: int) -> None:
    """End the fork as an interpreter ends, but without taking all apart that the server imported."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def main() -> None:
    sys.path.pop(0)
    request = Server(*sys.argv[1:]).serve()
    try:
        run(request)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        leave(end.code if isinstance(end.code, int) else int(end.code is not None))
    except Exception:
        traceback.print_exc()
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
