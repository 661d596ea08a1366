"""A stage's process as its caller follows it; see `runtime/test_subprocesses` for how it ends."""

import subprocess
import sys

import pytest

from quiver.schemas.errors import ResourceError
from quiver.stages.common import child
from quiver.stages.common.runtime.subprocesses import Process


def test_its_last_lines_and_exit_code_are_told():
    code = "for n in range(8): print(n)\nraise SystemExit(3)"
    lines = []
    with Process([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert child.follow(process, "test", lines.append) == (3, list("34567"))
    assert lines == list("01234567")


def test_a_time_limit_is_the_stages():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        Process(command, stdout=subprocess.PIPE) as process,
        pytest.raises(ResourceError, match="limit of 1 s") as caught,
    ):
        child.follow(process, "test", print, 1)
    assert caught.value.object == "stage test" and "placement.timeout_seconds" in caught.value.next
    assert process.returncode < 0
