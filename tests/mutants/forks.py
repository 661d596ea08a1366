"""Runs pytest in forks of a process that has imported torch and the like, so each begins at once.

    python -m tests.mutants.forks    # a request a line of standard input, an answer a line of output

A request is {"arguments": [...], "log": path, "limit": seconds or null}; the answer is the exit
status of pytest, or null if it did not end within the limit. The product is not imported here, since
every request reads another text of it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import sys
import time

IMPORTS = (
    "pyarrow.parquet",
    "pyarrow.pandas_compat",
    "pandas",
    "torch",
    "accelerate",
    "datasets",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "pytest",
)


def run(arguments: list[str], log: str, limit: float | None) -> int | None:
    """Run pytest in a fork with its output in a file; None if it had to be ended at the limit."""
    fork = os.fork()
    if fork == 0:
        _become_pytest(arguments, log)
    ends = None if limit is None else time.monotonic() + limit
    try:
        while True:
            ended, status = os.waitpid(fork, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if ends is not None and time.monotonic() > ends:
                return None
            time.sleep(0.05)
    finally:
        _end(fork)


def _become_pytest(arguments: list[str], log: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    empty = os.open(os.devnull, os.O_RDONLY)
    for handle, stream in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(handle, stream)
    import pytest

    status = 1
    try:
        status = pytest.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _end(fork: int) -> None:
    """End the tests and the processes that they started."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.killpg(fork, signal.SIGKILL)
        os.waitpid(fork, 0)  # pytest may have ended by itself, and left others behind


def main() -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
    os._exit(0)  # what the imports clean up at their end is of no use here, and they print


if __name__ == "__main__":
    main()
