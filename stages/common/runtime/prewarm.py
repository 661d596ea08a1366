"""The child process of a stage: started for a call, prewarmed before it, or kept after one.

    prewarm("generate", config)
    ...
    answer = ask("generate", call, stay=True)

    with StageProcess("generate") as child:    # the same by hand
        child.send(call)
        code, last_lines = child.follow(on_line)
        answer = child.answer()

    with in_one_process():    # one for the calls of all stages
        answer = ask("prompt", call)

A prewarmed process has imported the modules that its stage will need. A kept process has answered
an earlier call, with an engine asleep. A process decides nothing before its call, so losing a
waiting one, or starting it in vain, does no harm. If a call fails in a kept process, it is repeated
once in a fresh one.

Not of the spine: the output of a stage does not depend on the process that it runs in.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from quiver.schemas.errors import ResourceError, printable

from .allocator import allocator_environment
from .folders import sweep_folders, temporary_folder
from .subprocesses import Process

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # without tcmalloc, glibc keeps large blocks for the next tensor: fresh pages took a third of a
    # step
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    # Threads that wait by spinning take cores from those that work, but waking them for each small
    # product costs a fifth of a step. So they spin for a few microseconds.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "10000",
    "PYTHONWARNINGS": "ignore::FutureWarning",  # libraries warn about one another
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TQDM_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Environment variables of a stage's process, added to the caller's."""
_LONGEST_TEMPORARY_PATH = 70
"""A socket's path has at most 107 bytes, and vLLM's socket names take 36 of them."""
HINT_NAME = "hint.json"
"""File beside the call with the config, or the part of it that decides which modules to import."""
_Key = tuple[str | None, str | None, bool, frozenset[tuple[str, str]]]
_waiting: dict[_Key, StageProcess] = {}
"""Waiting processes by stage (None: all), interpreter, online or not, and variables set over their
environment. A process with other visible devices cannot be reused.
"""
_IN_ONE_PROCESS: ContextVar[bool] = ContextVar("quiver_in_one_process", default=False)
log = logging.getLogger(__name__)
told = logging.getLogger("quiver")
"""Logger for the lines that a recipe's user sees."""


class StageProcess:
    """`python -m quiver.stages [STAGE]`, started and waiting for its call.

    A context manager: leaving it ends the process and its descendants, and removes its folder for
    temporary files.
    """

    def __init__(
        self,
        stage: str | None,
        python: str | None = None,
        online: bool = False,
        env: Mapping[str, str] | None = None,
        hint: dict[str, Any] | None = None,
    ) -> None:
        """Start the process.

        Args:
            stage: name of the stage. None: it answers calls for any stage.
            python: the interpreter. Default: this one.
            online: if true, it may reach a model hub.
            env: variables set over its environment.
            hint: config for which it imports modules before its call.
        """
        self._hint = hint
        sweep_folders()
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            self._call_path = folder / "call.json"
            self._answer_path = folder / "answer.json"
            if hint is not None:
                (folder / HINT_NAME).write_text(json.dumps(hint))
            # -P: a module in the working folder must not shadow one of ours or a library's
            command = [python or sys.executable, "-u", "-P", "-m", "quiver.stages"]
            command += [stage] if stage else []
            command += ["--call", str(self._call_path), "--answer", str(self._answer_path)]
            offline = {} if online else {"HF_HUB_OFFLINE": "1"}
            variables = {**os.environ, **ENVIRONMENT, **allocator_environment(), **offline}
            variables |= env or {}
            if len(str(folder)) <= _LONGEST_TEMPORARY_PATH:
                # the next process reuses what torch compiled, and nothing stays in $TMPDIR
                cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
                compiled = os.path.join(cache, "quiver", "torchinductor")
                variables.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
                variables["TMPDIR"] = str(folder)
            self.stage = stage
            self.has_stayed = False
            """True once it has answered a call and stayed."""
            self._may_stay = False
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
        if not self._call_path.exists():
            # without a call it has nothing to finish, and deep in an import it ignores SIGTERM for
            # seconds
            self.process.end(grace=0)
        self._stack.__exit__(*error)

    def send(self, call: dict[str, Any], *, stay: bool = False) -> None:
        """Send a call: the only one or, with `stay`, one of several."""
        self._may_stay = stay
        self.stage = call.get("stage", self.stage)
        self._answer_path.unlink(missing_ok=True)
        self._call_path.write_text(json.dumps({**call, "stay": True} if stay else call))
        with suppress(BrokenPipeError):  # it has died, and `follow` reports how
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
            if not stay:
                self.process.stdin.close()

    def follow(
        self,
        on_line: Callable[[str], None],
        timeout: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[int, list[str]]:
        """Wait until the process ends, or stays after its answer.

        Args:
            on_line: called with each line that it prints.
            timeout: longest time to wait, in seconds.
            stopped: if it returns true, the wait ends with Stopped.

        Returns:
            Exit code (0 if it stays) and its last lines.

        Raises:
            ResourceError: it is still running after `timeout`.
            Stopped: `stopped` returned true.
        """
        last_lines: deque[str] = deque(maxlen=5)
        lines = self.process.lines(timeout, stopped, self.stays)
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
                return 0 if self.stays() else self.process.wait(), list(last_lines)
            last_lines.append(line)
            on_line(line)

    def answer(self) -> dict[str, Any] | None:
        """Return the answer it wrote, or None if it wrote none."""
        return json.loads(self._answer_path.read_text()) if self._answer_path.exists() else None

    def is_for(self, config: dict[str, Any]) -> bool:
        """Return True if its early imports suit `config`.

        Some options belong to the whole process, such as vLLM's batch-invariant kernels.
        """
        return self._hint is None or self._hint.get("options") == config.get("options")

    def stays(self) -> bool:
        """Return True if it has answered and waits for another call."""
        return self._may_stay and bool((self.answer() or {}).get("stays"))


def ask(
    stage: str,
    call: dict[str, Any],
    *,
    python: str | None = None,
    online: bool = False,
    env: Mapping[str, str] | None = None,
    stay: bool = False,
    on_line: Callable[[str], None] = log.info,
    timeout: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Send `call` to a waiting or a fresh process of `stage`, and return its answer.

    Args:
        stay: the process may wait for the next such call, with the engine that its stage keeps,
            until `end_waiting`.

    Raises:
        ResourceError: it ended without an answer, or is still running after `timeout` seconds.
        Stopped: `stopped` returned true.
    """
    is_shared = _IN_ONE_PROCESS.get()
    stay = stay or is_shared
    key = _key(None if is_shared else stage, python, online, env)
    child = _waiting.pop(key, None)
    is_dead = child is not None and child.process.poll() is not None  # it may have died unnoticed
    if child is not None and (is_dead or not child.is_for(call["config"])):
        child.__exit__(None, None, None)
        child = None
    started_at = time.monotonic()
    while True:
        with ExitStack() as stack:
            child = stack.enter_context(child or StageProcess(key[0], python, online, env))
            child.send(call, stay=stay)
            code, last_lines = child.follow(on_line, timeout, stopped)
            answer = child.answer()
            if child.stays():
                del answer["stays"]
                child.has_stayed = True
                # a waiting process outlives this block; a second one with the same key ends here
                if _waiting.setdefault(key, child) is child:
                    stack.pop_all()
        # an error of a process that kept an engine may be the engine's, so it is tried once more
        is_kept = child.has_stayed and not is_shared
        if answer is not None and not ("error" in answer and is_kept):
            return answer
        if answer is not None:
            problem = f"{answer['error']['object']}: {answer['error']['message']}"
        else:
            problem = f"its process ended {_manner(code)} without an answer"
        if not child.has_stayed:
            raise ResourceError(
                f"stage {stage}",
                f"{problem}; last words: {printable(' / '.join(last_lines[::-1]))}",
                state="finished shards and all versions are kept.",
                next="run the same command again; it goes on where this one stopped",
            )
        if timeout is not None:
            timeout = max(0.1, timeout - time.monotonic() + started_at)
        told.info("stage %s: once more, in a fresh process: %s", stage, problem)
        child = None


@contextmanager
def in_one_process() -> Iterator[None]:
    """Let one process answer all calls made inside, for any stage, as long as none fails.

    For work so small that most of its time would go into a process's imports.
    """
    token = _IN_ONE_PROCESS.set(True)
    try:
        yield
    finally:
        _IN_ONE_PROCESS.reset(token)


def prewarm(
    stage: str, config: dict[str, Any], python: str | None = None, online: bool = False
) -> None:
    """Start a process that imports what `stage` needs for `config`.

    Does nothing if one waits already, or inside `in_one_process`.
    """
    key = _key(stage, python, online)
    if key not in _waiting and not _IN_ONE_PROCESS.get():
        child = StageProcess(stage, python, online, hint=config)
        if _waiting.setdefault(key, child) is not child:  # another thread was faster
            child.__exit__(None, None, None)


def end_waiting() -> None:
    """End the waiting processes."""
    with suppress(KeyError):  # none is left
        while True:
            _, child = _waiting.popitem()
            child.__exit__(None, None, None)


def _key(
    stage: str | None, python: str | None, online: bool, env: Mapping[str, str] | None = None
) -> _Key:
    return stage, python, online, frozenset((env or {}).items())


def _manner(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"by {signal.Signals(-code).name}{hint}"
