"""Failures on purpose, at an operation of the store or where a function returns.

    with failing("shard.noted@3:kill"):         # this process, the third time at this place
    environment("commit.renamed:sleep=600")     # variables for a command: each of its processes

A failure is PLACE[@TIMES]:ACTION[=NUMBER]:

    kill            by SIGKILL
    signal=NUMBER   send this signal to itself
    raise=NUMBER    raise OSError with this number
    sleep=SECONDS

This module and what it imports need nothing but Python: each interpreter that a test starts with
`environment` imports it before anything else.
"""

from __future__ import annotations

import os
import pkgutil
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults.seam import watched

VARIABLE = "QUIVER_TEST_FAIL"
REACHED = "QUIVER_TEST_REACHED"
STARTED = Path(__file__).parent / "started"
_IN_STORE = "/store(/.*)?"
_WORK = r"/\.work/[0-9a-f]{64}\.\d+"
_PRIVATE = _WORK + r"\.[0-9a-f]{12}"
_VERSION = r"/v\d{6,}"
PLACES = {
    # any change of a folder named `store`, or of what lies in it
    "before": ("before", ".*", _IN_STORE),
    "after": ("after", ".*", _IN_STORE),
    # a shard counts
    "shard.noted": ("after", "link", _WORK + r"\.notes/part-\d+\.json"),
    # of a checkpoint the tensors are there, but not what they are; sealed, not flushed
    "checkpoint.half": ("before", "fsync", _PRIVATE + r"/\w+/state\.json"),
    "checkpoint.flushing": ("before", "fsync", _PRIVATE + r"/.+\.safetensors"),
    # a training's state is written, but no note; the training goes on from here
    "resume.saved": ("before", "fsync", _WORK + r"\.resume/state-.+"),
    "resume.noted": ("after", "replace", _WORK + r"\.resume/progress"),
    # the process has the folder to itself; it is complete; it will be visible; it is
    "commit.private": ("after", "rename", _PRIVATE),
    "commit.staged": ("after", "replace", _PRIVATE + r"/manifest\.json"),
    "commit.renaming": ("before", "rename", _VERSION),
    "commit.renamed": ("after", "rename", _VERSION),
    # another process sees it from now on; it is renewed
    "lease.taken": ("after", "link", r"\.leases/[^/]+/0*1"),
    "lease.renewed": ("after", "replace", r"\.leases/[^/]+/\d+"),
    # a worker's answer is there, in no shard; a stage is done, and its flow does not know yet
    "worker.answered": ("after", "quiver.stages.core.run.user_process.UserProcess.ask", ""),
    "flow.answered": ("after", "quiver.stages.core.run.stage_process.StageProcess.ask", ""),
}
"""When, at which call of the seam or function, and a pattern of the end of the path."""
_WORDS = re.compile(r"([\w.]+)(?:@([1-9]\d*))?:(kill|signal|raise|sleep)(?:=([\d.]+))?")
_HALF_WRITTEN = re.compile(r"\.\d+-[0-9a-f]{8}-[0-9a-f]{4}\.tmp$")


class Failure:
    """One failure, and how often its place was passed."""

    def __init__(self, words: str) -> None:
        place, times, self._action, number = _WORDS.fullmatch(words).groups()
        self._is_renewal = place == "lease.renewed"
        self.moment, self.call, ending = PLACES[place]
        self._path = re.compile(f".*{ending}")
        self._times = int(times or 1)
        self._number = float(number or 0)
        self.passed = 0
        self.failed_call = ""
        """The call at which it happened."""

    def around(self, call: str, path: str, do: Callable[[], Any]) -> Any:
        """Do a call of the seam, and fail before or after it."""
        # a thread renews leases, now and then
        is_renewal = threading.current_thread().name == "leases"
        is_here = (
            is_renewal == self._is_renewal
            and re.fullmatch(self.call, call)
            and self._path.fullmatch(_HALF_WRITTEN.sub("", path))
        )
        if is_here and self.moment == "before":
            self.pass_by(call, path)
        answer = do()
        if is_here and self.moment == "after":
            self.pass_by(call, path)
        return answer

    def pass_by(self, call: str, path: str) -> None:
        """Fail if it is time."""
        self.passed += 1
        if self.passed != self._times:
            return
        self.failed_call = call
        if REACHED in os.environ:
            Path(os.environ[REACHED]).touch()
        if self._action == "raise":
            raise OSError(int(self._number), os.strerror(int(self._number)), path)
        if self._action == "sleep":
            time.sleep(self._number)
        else:
            os.kill(os.getpid(), int(self._number or signal.SIGKILL))


@contextmanager
def failing(words: str) -> Iterator[Failure]:
    """Let this process fail."""
    failure = Failure(words)
    if not failure.call.startswith("quiver."):
        with watched(failure.around):
            yield failure
        return
    function = pkgutil.resolve_name(failure.call)

    def call(*arguments, **options):
        answer = function(*arguments, **options)
        failure.pass_by(failure.call, "")
        return answer

    with patch(failure.call, call):
        yield failure


def environment(words: str, reached: Path | None = None) -> dict[str, str]:
    """Variables that let a command and all processes that it starts fail, each for itself. The
    file `reached` is there once a process has come to the place."""
    path = os.pathsep.join(filter(None, [str(STARTED), os.environ.get("PYTHONPATH")]))
    variables = {VARIABLE: words, "PYTHONPATH": path}
    return variables | ({REACHED: str(reached)} if reached else {})


_until_the_end = ExitStack()


def start() -> None:
    """Let this process fail as its environment says."""
    _until_the_end.enter_context(failing(os.environ[VARIABLE]))
