"""The process of a stage: in a session of its own, with a lifeline, its lines read as they come,
and nobody left behind.

When whoever follows it is cancelled or fails, the whole group is ended (SIGTERM, then SIGKILL).
When he dies, even by kill -9, the child sees its lifeline (a pipe that nobody writes to) close and
kills its own group, with whatever it started; PDEATHSIG says the same to the child itself.

    with Child("generate") as child:
        child.tell(spec)
        code, last = follow(child.process, "generate", on_line)
        answer = child.answer()
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ResourceError

GRACE_SECONDS = 5
_LONGEST_LINE = 64 * 1024
_PR_SET_PDEATHSIG = 1
HINT = "hint.json"
"""Beside the spec: what a child that waits for its call may prepare for; see `early`."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MALLOC_MMAP_THRESHOLD_": str(
        2**32
    ),  # glibc keeps large blocks for the next tensor: fresh pages were a third of a step
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    # threads that wait by spinning take the cores from those that work,
    "OMP_WAIT_POLICY": "PASSIVE",
    # but to wake them for each small product costs a fifth of a step: some microseconds they spin
    "GOMP_SPINCOUNT": "10000",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of libraries about one another
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What a stage's process finds in its environment beside the caller's."""
log = logging.getLogger(__name__)


class Stopped(BaseException):
    """Whoever called `run_stage` wants the stage no longer; it was ended."""


class Child:
    """`python -m quiver.stages STAGE` (interpreter `python`), started, and waiting for its call; a
    context manager that ends its group.

    `online` lets it reach a model hub, `env` is put over its environment, `hint` is what it
    prepares for.
    """

    def __init__(
        self,
        stage: str,
        python: str | None = None,
        online: bool = False,
        env: Mapping[str, str] | None = None,
        hint: dict[str, Any] | None = None,
    ) -> None:
        with ExitStack() as held:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="quiver-")))
            self._spec, self._result = folder / "spec.json", folder / "result.json"
            if hint is not None:
                (folder / HINT).write_text(json.dumps(hint))
            # -P: no module of the working folder may stand in for one of ours or of a library
            command = [
                python or sys.executable,
                "-u",
                "-P",
                "-m",
                "quiver.stages",
                stage,
                "--waits",
            ]
            command += ["--spec", str(self._spec), "--result", str(self._result)]
            environment = {
                **os.environ,
                **ENVIRONMENT,
                **({} if online else {"HF_HUB_OFFLINE": "1"}),
                **(env or {}),
            }
            self.process = held.enter_context(started(command, environment))
            self._held = held.pop_all()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.__exit__(*error)

    def tell(self, spec: dict[str, Any]) -> None:
        """The call, once."""
        self._spec.write_text(json.dumps(spec))
        with suppress(BrokenPipeError):  # it died meanwhile, and `follow` says how
            self.process.stdin.write(b"\n")
            self.process.stdin.close()

    def answer(self) -> dict[str, Any] | None:
        """What it said when it ended; None where it came to another end."""
        return json.loads(self._result.read_text()) if self._result.exists() else None


@contextmanager
def started(command: Sequence[str], env: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    """The process, with a lifeline; its group is dead when this returns or raises."""
    life_read, life_write = os.pipe()
    try:
        child = subprocess.Popen(
            [*command, "--lifeline", str(life_read)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(life_read,),
            start_new_session=True,
            env=env,
        )
    except BaseException:
        os.close(life_write)
        raise
    finally:
        os.close(life_read)
    try:
        yield child
    finally:
        try:
            end_group(child)
        finally:  # a second signal must not keep the lifeline open
            child.stdout.close()
            os.close(life_write)
            with suppress(BrokenPipeError):
                child.stdin.close()


def follow(
    child: subprocess.Popen,
    stage: str,
    on_line: Callable[[str], None],
    timeout: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[int, list[str]]:
    """Exit code and last lines of the child, once it has ended. Stopped, ResourceError after
    `timeout` seconds."""
    last: deque[str] = deque(maxlen=5)
    for line in lines_of(child, stage, timeout, stopped):
        last.append(line)
        on_line(line)
    return child.wait(), list(last)


def lines_of(
    child: subprocess.Popen,
    stage: str,
    timeout: float | None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """Lines as they come; of a progress bar that rewrites its line only the last state.
    ResourceError after `timeout` s."""
    deadline = time.monotonic() + timeout if timeout else None
    rest, handle = b"", child.stdout.fileno()
    while True:
        if stopped():
            raise Stopped(stage)
        if deadline is not None and time.monotonic() > deadline:
            raise ResourceError(
                f"stage {stage}",
                f"still running after its limit of {timeout:g} s; it was ended",
                state="finished shards and all versions are kept.",
                next="raise placement.timeout_seconds, then run the same command again",
            )
        if select.select([handle], [], [], 0.2)[0]:
            data = os.read(handle, 65536)
        elif child.poll() is None:
            continue
        else:
            data = b""  # somebody that it started still holds the pipe
        *whole, rest = (rest + data).split(b"\n")
        for raw in whole if data else [*whole, rest]:
            line = raw.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            if line.strip():
                yield line
        if not data:
            return
        rest = rest[-_LONGEST_LINE:]


def end_group(child: subprocess.Popen) -> None:
    """End the child's whole session: SIGTERM, after `GRACE_SECONDS` SIGKILL; what it left behind is
    killed too."""
    try:
        if child.poll() is None:
            _signal_group(child, signal.SIGTERM)
            child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("process %d ignores SIGTERM; killing its group", child.pid)
    finally:
        _signal_group(child, signal.SIGKILL)
        child.wait()


def _signal_group(child: subprocess.Popen, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def watch_lifeline(handle: int) -> None:
    """In the child: die with the whole group as soon as the parent's end of the pipe is closed, by
    whatever end it came to."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        os.read(handle, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
