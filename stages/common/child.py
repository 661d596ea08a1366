"""The process of a stage: it is told its call, its lines are read as they come, and it answers.

    with Child("generate") as child:
        child.tell(spec)
        code, last = follow(child.process, "generate", on_line)
        answer = child.answer()

Its end, and the end of all that it started, is the matter of `runtime.subprocesses`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS, Process, Stopped

__all__ = ["ENVIRONMENT", "GRACE_SECONDS", "HINT", "Child", "Stopped", "follow", "lines_of"]

HINT = "hint.json"
"""Beside the spec: what a child that waits for its call may prepare for; see `early`."""
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    # glibc keeps large blocks for the next tensor: fresh pages were a third of a step
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
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


class Child:
    """`python -m quiver.stages STAGE` (interpreter `python`), started, and waiting for its call; a
    context manager that ends it with all that it started.

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
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quiver-")))
            self._spec = folder / "spec.json"
            self._result = folder / "result.json"
            if hint is not None:
                (folder / HINT).write_text(json.dumps(hint))
            # -P: no module of the working folder may stand in for one of ours or of a library
            command = [python or sys.executable, "-u", "-P", "-m", "quiver.stages", stage]
            command += ["--waits", "--spec", str(self._spec), "--result", str(self._result)]
            hub = {} if online else {"HF_HUB_OFFLINE": "1"}
            self.process = Process(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **ENVIRONMENT, **hub, **(env or {})},
            )
            stack.enter_context(self.process)
            self._stack = stack.pop_all()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def tell(self, spec: dict[str, Any]) -> None:
        """The call, once."""
        self._spec.write_text(json.dumps(spec))
        with suppress(BrokenPipeError):  # it died meanwhile, and `follow` says how
            self.process.stdin.write(b"\n")
            self.process.stdin.close()

    def answer(self) -> dict[str, Any] | None:
        """What it said when it ended; None where it came to another end."""
        return json.loads(self._result.read_text()) if self._result.exists() else None


def follow(
    process: Process,
    stage: str,
    on_line: Callable[[str], None],
    timeout: float | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[int, list[str]]:
    """Exit code and last lines of the stage's process, once it has ended. Stopped, ResourceError
    after `timeout` seconds."""
    last_lines: deque[str] = deque(maxlen=5)
    for line in lines_of(process, stage, timeout, stopped):
        last_lines.append(line)
        on_line(line)
    return process.wait(), list(last_lines)


def lines_of(
    process: Process,
    stage: str,
    timeout: float | None,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[str]:
    """Lines as they come. Stopped, ResourceError after `timeout` seconds."""
    try:
        yield from process.lines(timeout, stopped)
    except TimeoutError as error:
        raise ResourceError(
            f"stage {stage}",
            f"still running after its limit of {timeout:g} s; it was ended",
            state="finished shards and all versions are kept.",
            next="raise placement.timeout_seconds, then run the same command again",
        ) from error
