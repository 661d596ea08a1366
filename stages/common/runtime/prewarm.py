"""The process of a stage, and one that is started before its call comes: it imports what the stage
will need, and waits.

    prewarm("generate", config)
    ...
    with take_prewarmed("generate") or StageProcess("generate") as child:
        child.send(call)
        code, last_lines = child.follow(on_line)
        answer = child.answer()

A process decides nothing before its call. Where a prewarmed one is gone, or was not needed, no harm
is done.

Not of the spine: what a stage makes does not depend on the process that it runs in.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from quiver.schemas.errors import ResourceError

from .allocator import allocator_environment
from .folders import sweep_folders, temporary_folder
from .subprocesses import Process

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # glibc, where there is no other allocator, keeps large blocks for the next tensor: fresh pages
    # were a third of a step
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    # Threads that wait by spinning take the cores from those that work, but to wake them for each
    # small product costs a fifth of a step: they spin for some microseconds.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # of libraries about one another
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What a stage's process finds in its environment beside the caller's."""
_LONGEST_TEMPORARY_PATH = 70
"""A socket's path has 107 bytes at most, and vLLM's are named by 36 of them."""
HINT_NAME = "hint.json"
"""Beside the call: the config, or as much of it as says what to import."""
_prewarmed: dict[tuple[str, str | None, bool], StageProcess] = {}


class StageProcess:
    """`python -m quiver.stages STAGE`, started and waiting for its call; a context manager that
    ends it with all that it started, and removes what it left in its folder for temporary files."""

    def __init__(
        self,
        stage: str,
        python: str | None = None,
        online: bool = False,
        env: Mapping[str, str] | None = None,
        hint: dict[str, Any] | None = None,
    ) -> None:
        """`online`: it may reach a model hub. `env` is put over its environment. `hint`: the config
        for which it imports what is needed before its call."""
        sweep_folders()
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            self._call_path = folder / "call.json"
            self._answer_path = folder / "answer.json"
            if hint is not None:
                (folder / HINT_NAME).write_text(json.dumps(hint))
            # -P: no module of the working folder may stand in for one of ours or of a library
            command = [python or sys.executable, "-u", "-P", "-m", "quiver.stages", stage]
            command += ["--call", str(self._call_path), "--answer", str(self._answer_path)]
            offline = {} if online else {"HF_HUB_OFFLINE": "1"}
            variables = {**os.environ, **ENVIRONMENT, **allocator_environment(), **offline}
            variables |= env or {}
            if len(str(folder)) <= _LONGEST_TEMPORARY_PATH:
                # what torch compiled is there for the next process too
                compiled = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
                variables.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
                variables["TMPDIR"] = str(folder)
            self.stage = stage
            self.process = Process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=variables,
            )
            stack.enter_context(self.process)
            self._stack = stack.pop_all()

    def __enter__(self) -> StageProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def send(self, call: dict[str, Any]) -> None:
        """The call, once."""
        self._call_path.write_text(json.dumps(call))
        with suppress(BrokenPipeError):  # it died meanwhile, and `follow` says how
            self.process.stdin.write(b"\n")
            self.process.stdin.close()

    def follow(
        self,
        on_line: Callable[[str], None],
        timeout: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[int, list[str]]:
        """Exit code and last lines, once it has ended; `on_line` is given each line as it comes.
        Stopped, ResourceError after `timeout` seconds."""
        last_lines: deque[str] = deque(maxlen=5)
        lines = self.process.lines(timeout, stopped)
        while True:
            try:
                line = next(lines, None)
            except TimeoutError as error:
                raise ResourceError(
                    f"stage {self.stage}",
                    f"still running after its limit of {timeout:g} s; it was ended",
                    state="finished shards and all versions are kept.",
                    next="raise placement.timeout_seconds, then run the same command again",
                ) from error
            if line is None:
                return self.process.wait(), list(last_lines)
            last_lines.append(line)
            on_line(line)

    def answer(self) -> dict[str, Any] | None:
        """What it said when it ended; None where it came to another end."""
        return json.loads(self._answer_path.read_text()) if self._answer_path.exists() else None


def prewarm(
    stage: str, config: dict[str, Any], python: str | None = None, online: bool = False
) -> None:
    """Start a process that imports what `stage` needs for `config`; at most one of a kind."""
    key = (stage, python, online)
    if key not in _prewarmed:
        _prewarmed[key] = StageProcess(stage, python, online, hint=config)


def take_prewarmed(
    stage: str, python: str | None = None, online: bool = False
) -> StageProcess | None:
    """The process that waits for a call of `stage`, the caller's from now on; None where there is
    none, or it is dead."""
    child = _prewarmed.pop((stage, python, online), None)
    if child is not None and child.process.poll() is not None:
        child.__exit__(None, None, None)
        return None
    return child


def end_prewarmed() -> None:
    """End those that nobody took."""
    while _prewarmed:
        _, child = _prewarmed.popitem()
        child.__exit__(None, None, None)
