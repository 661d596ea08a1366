"""A stage as a child process: in a session of its own, its log streamed, and nobody left behind.

A stage that is done already is found in this process, in milliseconds. Otherwise `python -m stages NAME` runs it: memory and
the GPU are free when it ends. When the caller is cancelled or fails, the whole group is ended (SIGTERM, then SIGKILL). When the
caller dies, even by kill -9, the child sees its lifeline (a pipe that nobody writes to) close and kills its own group, with
whatever it started; PDEATHSIG says the same to the child itself.

    outcome = run_stage(Call("generate", config, store.path, refs={"prompts": "a/prompts@1", "policy": "a/policy@0"}))
"""

from __future__ import annotations

import ctypes
import inspect
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import ConfigError, ResourceError, from_dict, printable
from schemas.refs import Ref

from .config import parse
from .store import Store
from .work import LookupOnly, NotDone

GRACE_SECONDS = 5
_LONGEST_LINE = 64 * 1024
_PR_SET_PDEATHSIG = 1
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),  # glibc keeps large blocks for the next tensor: fresh pages were a third of a step
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait by spinning take the cores from those that work,
    "GOMP_SPINCOUNT": "10000",  # but to wake them for each small product costs a fifth of a step: some microseconds they spin
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of libraries about one another
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What a stage's process finds in its environment beside the caller's."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """What to run: the stage, its config as plain JSON, the store, and the references (one, or several) by the names that `run`
    gives them. `share`: any number of equal calls, on any hosts that see the store, do the work together, and each returns the
    version; a call that fails leaves its part to the others, so the work is done as soon as one of them returns."""

    stage: str
    config: dict[str, Any]
    store: Path | str
    refs: dict[str, str | list[str]] = field(default_factory=dict)
    into: str | None = None
    force: bool = False
    share: bool = False


class Stopped(BaseException):
    """Whoever called `run_stage` wants the stage no longer; it was ended."""


@dataclass(frozen=True)
class Outcome:
    """What came of it. `cached`: the version was there already. `rows` and `metrics` are the manifest's, `seconds` this call's."""

    ref: str
    cached: bool
    rows: int
    seconds: float
    metrics: dict[str, Any]


def perform(call: Call, *, lookup: bool = False) -> Outcome:
    """Run the stage in this process. With `lookup`, only find a finished version: NotDone when there is none."""
    from stages import load

    config_class, run = load(call.stage)
    started = time.monotonic()
    config = parse(config_class, call.config, f"stage {call.stage}")
    store = LookupOnly(call.store) if lookup else Store(call.store)
    ref: Ref = run(config, store, **call.refs, into=call.into, force=call.force, **_sharing(call, run))
    manifest = store.open(ref).manifest
    cached = str(ref) not in store.written
    seconds = round(time.monotonic() - started, 3)
    return Outcome(str(ref), cached, manifest.rows, seconds, manifest.metrics)


def _sharing(call: Call, run: Callable[..., Ref]) -> dict[str, bool]:
    if call.share and "share" not in inspect.signature(run).parameters:
        raise ConfigError(
            f"stage {call.stage}", "its work can not be shared among processes", next="start it once, without share"
        )
    return {"share": True} if call.share else {}


def run_stage(
    call: Call,
    *,
    python: str | None = None,
    timeout: float | None = None,
    online: bool = False,
    on_line: Callable[[str], None] = log.info,
    env: Mapping[str, str] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Find the finished version, or run the stage in a child (interpreter `python`, at most `timeout` seconds) and wait for it.

    Raises what the stage raised; ResourceError when the child died or took too long. `online` lets it reach a model hub, `env`
    is put over the child's environment. As soon as `stopped()` is true (another thread's wish) the child is ended: Stopped.
    """
    started = time.monotonic()
    if not call.force:
        try:
            return perform(call, lookup=True)
        except NotDone:
            pass
    with tempfile.TemporaryDirectory(prefix="quiver-") as folder:
        spec, result = Path(folder, "spec.json"), Path(folder, "result.json")
        spec.write_text(json.dumps({**call.__dict__, "store": str(call.store)}))
        # -P: no module of the working folder may stand in for one of ours or of a library
        command = [
            python or sys.executable,
            "-u",
            "-P",
            "-m",
            "stages",
            call.stage,
            "--spec",
            str(spec),
            "--result",
            str(result),
        ]
        environment = {**os.environ, **ENVIRONMENT, **({} if online else {"HF_HUB_OFFLINE": "1"}), **(env or {})}
        code, last = _wait(command, environment, call.stage, timeout, on_line, stopped)
        answer = json.loads(result.read_text()) if result.exists() else None
    if answer is None:
        raise ResourceError(
            f"stage {call.stage}",
            f"its process ended {_how(code)} without an answer; last words: {printable(' / '.join(last[::-1]))}",
            state="finished shards and all versions are kept.",
            next="run the same command again; it goes on where this one stopped",
        )
    if "error" in answer:
        raise from_dict(answer["error"])
    return Outcome(**{**answer, "seconds": round(time.monotonic() - started, 3)})


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{hint}"


def _wait(
    command: list[str],
    env: dict[str, str],
    stage: str,
    timeout: float | None,
    on_line: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[int, list[str]]:
    """Exit code and last lines of the child; its group is dead when this returns or raises."""
    life_read, life_write = os.pipe()
    try:
        child = subprocess.Popen(
            [*command, "--lifeline", str(life_read)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(life_read,),
            start_new_session=True,
            env=env,
        )
    finally:
        os.close(life_read)
    last: deque[str] = deque(maxlen=5)
    try:
        for line in _lines(child, stage, timeout, stopped):
            last.append(line)
            on_line(line)
        return child.wait(), list(last)
    finally:
        try:
            end_group(child)
        finally:  # a second signal must not keep the lifeline open
            child.stdout.close()
            os.close(life_write)


def _lines(
    child: subprocess.Popen, stage: str, timeout: float | None, stopped: Callable[[], bool] = lambda: False
) -> Iterator[str]:
    """Lines as they come; of a progress bar that rewrites its line only the last state. ResourceError after `timeout` s."""
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
    """End the child's whole session: SIGTERM, after `GRACE_SECONDS` SIGKILL; what it left behind is killed too."""
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
    """In the child: die with the whole group as soon as the parent's end of the pipe is closed, by whatever end it came to."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        os.read(handle, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="lifeline").start()
