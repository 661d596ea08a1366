"""A stage's process as its caller follows it; see `test_subprocesses` for how it ends."""

import pytest

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.prewarm import StageProcess


@pytest.fixture
def interpreter(tmp_path):
    """Makes an interpreter that runs a shell script, whatever it is asked to run."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_its_last_lines_and_exit_code_are_told(interpreter):
    lines = []
    with StageProcess("policy", interpreter("seq 8; exit 3")) as child:
        assert child.follow(lines.append) == (3, list("45678"))
        assert child.answer() is None
    assert lines == list("12345678")


def test_a_time_limit_is_the_stages(interpreter):
    with (
        StageProcess("policy", interpreter("sleep 600")) as child,
        pytest.raises(ResourceError, match="limit of 1 s") as caught,
    ):
        child.follow(print, 1)
    assert caught.value.object == "stage policy"
    assert "placement.timeout_seconds" in caught.value.next
    assert child.process.returncode < 0


def test_a_time_limit_of_whoever_reads_its_lines_is_not_its_own(interpreter):
    def on_line(line):
        raise TimeoutError("the server does not answer")

    with (
        StageProcess("policy", interpreter("echo hello; sleep 600")) as child,
        pytest.raises(TimeoutError, match="the server does not answer"),
    ):
        child.follow(on_line)
