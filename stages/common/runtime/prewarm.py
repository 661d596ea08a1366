"""The process of a stage: one that is started for its call, one that was started before it and has
imported what the stage will need, or one that stayed behind an earlier call, with an engine asleep.

    prewarm("generate", config)
    ...
    answer = ask("generate", call, stay=True)

    with StageProcess("generate") as child:    # the same by hand
        child.send(call)
        code, last_lines = child.follow(on_line)
        answer = child.answer()

    with in_one_process():    # one for the calls of all stages
        answer = ask("prompt", call)

A process decides nothing before its call. Where one that waits is gone, or was not needed, no harm
is done; and what fails in one that stayed is done once more, in a fresh one.

Not of the spine: what a stage makes does not depend on the process that it runs in.
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
_Key = tuple[str | None, str | None, bool, frozenset[tuple[str, str]]]
_waiting: dict[_Key, StageProcess] = {}
"""By stage (None: all), interpreter, whether it is online, and what was put over its environment: a
process is no use where devices are others."""
_IN_ONE_PROCESS: ContextVar[bool] = ContextVar("quiver_in_one_process", default=False)
log = logging.getLogger(__name__)
told = logging.getLogger("quiver")
"""What whoever runs a recipe reads."""


class StageProcess:
    """`python -m quiver.stages [STAGE]`, started and waiting for its call; a context manager that
    ends it with all that it started, and removes what it left in its folder for temporary files."""

    def __init__(
        self,
        stage: str | None,
        python: str | None = None,
        online: bool = False,
        env: Mapping[str, str] | None = None,
        hint: dict[str, Any] | None = None,
    ) -> None:
        """`stage`: None for calls of any. `online`: it may reach a model hub. `env` is put over its
        environment. `hint`: the config for which it imports what is needed before its call."""
        self._hint = hint
        sweep_folders()
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            self._call_path = folder / "call.json"
            self._answer_path = folder / "answer.json"
            if hint is not None:
                (folder / HINT_NAME).write_text(json.dumps(hint))
            # -P: no module of the working folder may stand in for one of ours or of a library
            command = [python or sys.executable, "-u", "-P", "-m", "quiver.stages"]
            command += [stage] if stage else []
            command += ["--call", str(self._call_path), "--answer", str(self._answer_path)]
            offline = {} if online else {"HF_HUB_OFFLINE": "1"}
            variables = {**os.environ, **ENVIRONMENT, **allocator_environment(), **offline}
            variables |= env or {}
            if len(str(folder)) <= _LONGEST_TEMPORARY_PATH:
                # what torch compiled is there for the next process too, and nothing stays in
                # $TMPDIR
                cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
                compiled = os.path.join(cache, "quiver", "torchinductor")
                variables.setdefault("TORCHINDUCTOR_CACHE_DIR", compiled)
                variables["TMPDIR"] = str(folder)
            self.stage = stage
            self.has_stayed = False
            """Whether it has answered an earlier call."""
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
            # it was never called and has nothing to finish; deep in an import it would not hear
            # SIGTERM for seconds
            self.process.end(grace=0)
        self._stack.__exit__(*error)

    def send(self, call: dict[str, Any], *, stay: bool = False) -> None:
        """The call: the only one, or where it is to `stay`, one of several."""
        self._may_stay = stay
        self.stage = call.get("stage", self.stage)
        self._answer_path.unlink(missing_ok=True)
        self._call_path.write_text(json.dumps({**call, "stay": True} if stay else call))
        with suppress(BrokenPipeError):  # it died meanwhile, and `follow` says how
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
        """Exit code and last lines, once it has ended, or stays behind its answer (0 then);
        `on_line` is given each line as it comes. Stopped, ResourceError after `timeout` seconds."""
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
        """What it said in the end; None where it came to another one."""
        return json.loads(self._answer_path.read_text()) if self._answer_path.exists() else None

    def is_for(self, config: dict[str, Any]) -> bool:
        """Whether what it imported before its call is what `config` needs: some options are of the
        process, such as kernels of vLLM's that do not depend on the batch."""
        return self._hint is None or self._hint.get("options") == config.get("options")

    def stays(self) -> bool:
        """Whether it has answered and waits for another call."""
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
    """What a process of `stage` answers to `call`: one that waits, or a fresh one. ResourceError
    where it ends without an answer, or is still running after `timeout` seconds; Stopped.

    `stay`: it may wait for the next such call, with what its stage keeps for that, until
    `end_waiting`.
    """
    is_shared = _IN_ONE_PROCESS.get()
    stay = stay or is_shared
    key = _key(None if is_shared else stage, python, online, env)
    child = _waiting.pop(key, None)
    is_dead = child is not None and child.process.poll() is not None  # while nobody looked
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
                if _waiting.setdefault(key, child) is child:
                    stack.pop_all()
        if answer is not None and not ("error" in answer and child.has_stayed):
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
    """What is asked inside is done by one process, whatever its stage, as long as none fails: for
    work so small that what a process imports would be most of it."""
    token = _IN_ONE_PROCESS.set(True)
    try:
        yield
    finally:
        _IN_ONE_PROCESS.reset(token)


def prewarm(
    stage: str, config: dict[str, Any], python: str | None = None, online: bool = False
) -> None:
    """Start a process that imports what `stage` needs for `config`, unless one waits already, or
    one does for all stages."""
    key = _key(stage, python, online)
    if key not in _waiting and not _IN_ONE_PROCESS.get():
        child = StageProcess(stage, python, online, hint=config)
        if _waiting.setdefault(key, child) is not child:  # another thread was faster
            child.__exit__(None, None, None)


def end_waiting() -> None:
    """End those that nobody took."""
    with suppress(KeyError):  # there is none left
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
