"""The child process of a stage: started for one call, or resident, which means kept for the next.

    start_ahead("generate", config)                   # now; it imports what its call will need
    outcome = run_call(call)                          # use it; its engine may sleep until the next
    end_waiting()                                     # end all that wait for a call

    with one_child_for_any_stage():                   # one process for the calls of all stages
        outcome = run_call(call)

With `placement.resident_engine` (`Where.resident_engine`), generate's process stays resident after
its answer and its engine sleeps. Then it keeps no more of a device than its context and its graphs.

At most one process of each stage waits for a call: resident, or started ahead. It ends with the
process that started it. It decides nothing before its call, so losing it does no harm:
* if it died meanwhile, or the call has other `Terms`, the call gets a fresh process;
* if a call fails in a process that has answered before, it is repeated once in a fresh one, because
  the reason may be the engine that slept. The caller sees a log line, and no error.

Not of the spine: the output of a stage does not depend on the process that it runs in.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from ctypes.util import find_library
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from quiver.schemas.errors import ResourceError, from_dict, printable
from quiver.stages.core.processes.subprocesses import Process, ending

from .call import Call, Outcome, quiver_version, require_version
from .folders import sweep_folders, temporary_folder

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
ANY_STAGE = "any"
"""In place of a stage's name: the process answers calls for all stages, and waits after each."""
CALL_NAME, ANSWER_NAME = "call.json", "answer.json"
_find_library = cache(find_library)
_FOR_ANY_STAGE: ContextVar[bool] = ContextVar("quiver_for_any_stage", default=False)
log = logging.getLogger(__name__)
user_log = logging.getLogger("quiver")
"""Logger for the lines that a recipe's user sees."""


class Terms(NamedTuple):
    """What a process is started for. One that waits gets only calls with equal terms."""

    stage: str
    """Name of its stage, or ANY_STAGE."""
    python: str | None = None
    """The interpreter. Default: this one."""
    online: bool = False
    """If true, it may reach a model hub."""
    env: Mapping[str, str] | None = None
    """Variables set over its environment. A process has seen the devices that these name."""
    options: Any = None
    """The config's `options`; some belong to the whole process, such as vLLM's batch-invariant
    kernels."""


class StageProcess:
    """`python -m quiver.stages STAGE FOLDER`, started and waiting for its call.

    A context manager: leaving it ends the process and its descendants, and removes FOLDER, which is
    also its folder for temporary files.
    """

    def __init__(self, terms: Terms, upcoming: dict[str, Any] | None = None) -> None:
        """Start the process. It imports what an `upcoming` stage and its config will need."""
        self.terms = terms
        self.is_resident = False
        """True once it has answered and waits for another call."""
        self._has_call = False
        sweep_folders()
        with ExitStack() as stack:
            folder = stack.enter_context(temporary_folder())
            self._call_path = folder / CALL_NAME
            self._answer_path = folder / ANSWER_NAME
            if upcoming is not None:
                self._call_path.write_text(json.dumps(upcoming))
            # outside $TMPDIR, so that the next process reuses what torch compiled
            cached = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            compiled = os.path.join(cached, "quiver", "torchinductor")
            variables = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, **ENVIRONMENT}
            variables |= {**allocator_environment(terms.stage), **(terms.env or {})}
            if not terms.online:
                variables["HF_HUB_OFFLINE"] = "1"
            if len(str(folder)) <= _LONGEST_TEMPORARY_PATH:
                variables["TMPDIR"] = str(folder)
            # -P: a module in the working folder must not shadow one of ours or a library's
            command = [terms.python or sys.executable, "-u", "-P", "-m", "quiver.stages"]
            self.process = Process(
                [*command, terms.stage, str(folder)],
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
        self.end()

    def end(self) -> None:
        """End the process and its descendants, and remove its folder."""
        if not self._has_call:
            # without a call it has nothing to finish, and deep in an import it ignores SIGTERM for
            # seconds
            self.process.end(grace=0)
        self._stack.close()

    def ask(
        self,
        call: dict[str, Any],
        *,
        resident: bool = False,
        on_line: Callable[[str], None] = log.info,
        timeout: float | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> tuple[dict[str, Any] | None, str]:
        """Send a call, and wait until the process ends, or waits again after its answer.

        Args:
            call: the call; unless `resident`, it is the last one.
            on_line: called with each line that it prints.
            timeout: longest time to wait, in seconds.
            stopped: if it returns true, the wait ends with Stopped.

        Returns:
            The answer, or None and how the process ended without one.

        Raises:
            ResourceError: it is still running after `timeout`.
            Stopped: `stopped` returned true.
        """
        self._has_call = True
        self.is_resident = False
        self._answer_path.unlink(missing_ok=True)
        self._call_path.write_text(json.dumps({**call, "resident": resident}))
        with suppress(BrokenPipeError):  # it has died, which its exit code tells
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()
            if not resident:
                self.process.stdin.close()
        last_lines: deque[str] = deque(maxlen=5)
        lines = self.process.lines(timeout, stopped, lambda: (self._answer() or {}).get("resident"))
        while True:
            try:
                line = next(lines, None)
            except TimeoutError as error:
                raise ResourceError(
                    f"stage {call.get('stage')}",
                    f"still running after its limit of {timeout:g} s; it was ended",
                    state="finished shards and all versions are kept.",
                    next="raise placement.timeout_seconds, then run the same command again",
                ) from error
            if line is None:
                break
            last_lines.append(line)
            on_line(line)
        answer = self._answer()
        if answer is not None:
            self.is_resident = answer.pop("resident", False)
            return answer, ""
        how = ending(self.process.wait())
        last_words = printable(" / ".join(reversed(last_lines)))
        return None, f"its process ended {how} without an answer; its last output: {last_words}"

    def _answer(self) -> dict[str, Any] | None:
        return json.loads(self._answer_path.read_text()) if self._answer_path.exists() else None


_waiting: dict[str, StageProcess] = {}
"""The processes that wait for a call, by the stage in their terms."""


def run_call(
    call: Call,
    *,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] = log.info,
    stopped: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Run `call` in its stage's waiting process, or in a fresh one, and wait for it.

    With `resident_engine`, the process is kept for the next such call, if its stage keeps an
    engine.

    Args:
        call: the call to answer; `call.where` names the interpreter and the time limit.
        env: variables set over the process's environment.
        on_line: called with each line that the process prints.
        stopped: polled while waiting; once it returns true (at another thread's wish), the process
            is ended.

    Raises:
        QuiverError: the stage raised it.
        ResourceError: the process ended without an answer, or took too long.
        Stopped: `stopped` returned true.
    """
    where, timeout = call.where, call.where.timeout_seconds
    options = call.config.get("options")
    terms = Terms(call.stage, where.python, where.online, env or None, options)
    for_any_stage = _FOR_ANY_STAGE.get()
    if for_any_stage:
        terms = terms._replace(stage=ANY_STAGE, options=None)
    started_at = time.monotonic()
    child = _waiting.pop(terms.stage, None)
    if child is not None and (child.terms != terms or child.process.poll() is not None):
        child.end()
        child = None
    while True:
        with ExitStack() as stack:
            child = stack.enter_context(child or StageProcess(terms))
            was_resident = child.is_resident
            answer, problem = child.ask(
                call.to_json(),
                resident=where.resident_engine or for_any_stage,
                on_line=on_line,
                timeout=timeout,
                stopped=stopped,
            )
            # a resident process outlives this block; if another thread has kept one, this one ends
            if child.is_resident and _waiting.setdefault(terms.stage, child) is child:
                stack.pop_all()
        if answer is not None and ("error" not in answer or for_any_stage or not was_resident):
            break
        if answer is not None:
            problem = f"{answer['error']['object']}: {answer['error']['message']}"
        if not was_resident:
            raise ResourceError(
                f"stage {call.stage}",
                problem,
                state="finished shards and all versions are kept.",
                next="run the same command again; it continues where this one stopped",
            )
        if timeout is not None:
            timeout = max(0.1, timeout - time.monotonic() + started_at)
        user_log.info("stage %s: trying again in a fresh process: %s", call.stage, problem)
        child = None
    # before its error: a child of another version refuses the call, or misreads it
    python = where.python or sys.executable
    require_version(python, answer.pop("quiver", None), quiver_version())
    if "error" in answer:
        raise from_dict(answer["error"])
    outcome = Outcome(**answer)
    seconds = round(time.monotonic() - started_at, 3)
    return outcome if outcome.cached else replace(outcome, seconds=seconds)


def start_ahead(
    stage: str, config: dict[str, Any], python: str | None = None, online: bool = False
) -> None:
    """Start a process that imports what `stage` needs for `config`, and waits for its call.

    Does nothing if one waits already, or inside `one_child_for_any_stage`.
    """
    if stage not in _waiting and not _FOR_ANY_STAGE.get():
        terms = Terms(stage, python, online, options=config.get("options"))
        child = StageProcess(terms, {"stage": stage, "config": config})
        if _waiting.setdefault(stage, child) is not child:  # another thread was faster
            child.end()


def end_waiting() -> None:
    """End the processes that wait for a call."""
    with suppress(KeyError):  # none is left
        while True:
            _waiting.popitem()[1].end()


@contextmanager
def one_child_for_any_stage() -> Iterator[None]:
    """Let one process answer all calls inside, for any stage, as long as none fails.

    For work so small that most of its time would go into a process's imports.
    """
    token = _FOR_ANY_STAGE.set(True)
    try:
        yield
    finally:
        _FOR_ANY_STAGE.reset(token)


def allocator_environment(stage: str) -> dict[str, str]:
    """Return the environment variables of memory allocators for a child process of `stage`.

    On a GPU, optimize and logprobs get segments that grow with their micro-batches, not vLLM, whose
    sleep does not allow them. The process uses tcmalloc if this host has it: an optimize process
    then uses slightly less memory, and is as fast or slightly faster in most shapes
    (tests/benchmarks/RESULTS.md). What the user has set stays, also an empty LD_PRELOAD.
    """
    variables = {}
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if stage in ("optimize", "logprobs") and not is_set:
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    library = _find_library("tcmalloc_minimal") or _find_library("tcmalloc")
    if library and "LD_PRELOAD" not in os.environ:
        variables["LD_PRELOAD"] = library
        # by default it prints a report for each tensor above a gigabyte
        variables["TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"] = str(2**62)
    return variables


@dataclass
class ThisProcess:
    """What a stage's process knows of its next call."""

    may_be_resident: bool = False
    """True if the caller would keep this process after the present call."""
    resident_engine: Any = None
    """Engine that sleeps until the next call; its `close()` is called if none comes. Without one,
    the process of a single stage ends after its answer."""


this_process = ThisProcess()
