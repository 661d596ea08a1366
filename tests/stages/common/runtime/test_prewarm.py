"""A stage's process as its caller follows it; see `test_subprocesses` for how it ends."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from quiver.schemas.errors import ResourceError
from quiver.stages.common.runtime.prewarm import StageProcess
from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS

_LIBRARIES = [Path(path) for path in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")]


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


def test_one_that_was_never_called_ends_at_once(interpreter, caplog):
    """It is often deep in an import, and does not hear SIGTERM."""
    script = "trap '' TERM; echo up; while true; do sleep 600; done"
    with StageProcess("policy", interpreter(script)) as child:
        assert child.process.stdout.readline() == b"up\n"
        left_at = time.monotonic()
    assert time.monotonic() - left_at < GRACE_SECONDS / 2
    assert caplog.messages == []


# -- its memory


def libraries(interpreter) -> str:
    """The files that are mapped by a process that a stage's own stands in for."""
    lines = []
    script = "exec /usr/bin/env cat /proc/self/maps"
    with StageProcess("policy", interpreter(script)) as child:
        assert child.follow(lines.append)[0] == 0
    return "\n".join(lines)


def test_tcmalloc_gives_it_its_memory_where_the_host_has_it(interpreter, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    names = {"libtcmalloc_minimal.so.4", "libtcmalloc.so.4"}
    has_it = any((folder / name).is_file() for folder in _LIBRARIES for name in names)
    assert ("libtcmalloc" in libraries(interpreter)) == has_it


def test_an_allocator_that_its_user_chose_stays(interpreter, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "")
    assert "libtcmalloc" not in libraries(interpreter)


# -- its folder


CALLER = """
import sys
from quiver.stages.common.runtime.prewarm import StageProcess
from quiver.stages.common.runtime.subprocesses import GRACE_SECONDS
with StageProcess("policy", sys.argv[1]) as child:
    child.follow(print)
"""


@pytest.fixture
def temporary(monkeypatch):
    """The folder for temporary files, of this test alone; its path is short, for sockets."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def caller(interpreter: str) -> tuple[subprocess.Popen, Path]:
    """A process that has a stage's process, and the folder of that."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", CALLER, interpreter], stdout=subprocess.PIPE, text=True
    )
    return process, Path(process.stdout.readline().strip())


def test_what_it_leaves_in_its_temporary_folder_goes_with_it(interpreter, temporary):
    script = 'echo $TMPDIR; mkdir $TMPDIR/sub; touch $TMPDIR/sub/file "$TMPDIR/a socket"'
    lines = []
    with StageProcess("policy", interpreter(script)) as child:
        child.follow(lines.append)
        assert os.listdir(temporary) == [os.path.basename(lines[0])]
        assert sorted(os.listdir(lines[0])) == ["a socket", "lock", "sub"]
    assert os.listdir(temporary) == []


def test_what_torch_compiles_is_kept_outside_the_folder_for_temporary_files(
    interpreter, temporary, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it once it compiled
    lines = []
    with StageProcess("policy", interpreter("echo $TORCHINDUCTOR_CACHE_DIR")) as child:
        child.follow(lines.append)
    assert lines == ["/caches/quiver/torchinductor"]


def test_what_a_killed_caller_left_is_swept_when_the_next_one_starts(interpreter, temporary):
    """With its sockets; not what the living have, nor what says of no owner."""
    waits = interpreter("touch $TMPDIR/socket; echo $TMPDIR; sleep 600")
    dead, dead_folder = caller(waits)
    alive, alive_folder = caller(waits)
    (temporary / "quiver-of-before").mkdir()
    (temporary / "other").mkdir()
    (temporary / "quiver-link").symlink_to(temporary / "other")
    assert (dead_folder / "socket").exists() and (alive_folder / "socket").exists()
    dead.kill()
    dead.wait()
    third, third_folder = caller(waits)
    names = {"other", "quiver-link", "quiver-of-before"}
    assert set(os.listdir(temporary)) == {alive_folder.name, third_folder.name, *names}
    for process in (alive, third):
        process.send_signal(signal.SIGINT)
        process.wait(30)
    assert set(os.listdir(temporary)) == names


def test_what_another_user_left_is_not_swept(interpreter, temporary):
    if os.getuid() != 0:
        pytest.skip("only root can make a folder another user's")
    dead, folder = caller(interpreter("echo $TMPDIR; sleep 600"))
    dead.kill()
    dead.wait()
    os.chown(folder, 12345, 12345)
    with StageProcess("policy", interpreter("true")):
        assert folder.exists()
