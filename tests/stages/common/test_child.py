"""Child processes: nobody is left behind, whatever happens to the parent."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from quiver.schemas.errors import ResourceError
from quiver.stages.common import child

# A child that starts a child of its own, both ignoring SIGTERM, and says both ids.
STUBBORN = """
    import os, signal, subprocess, sys, time
    from quiver.stages.common.child import watch_lifeline
    watch_lifeline(int(sys.argv[sys.argv.index("--lifeline") + 1]))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
    print("ids", os.getpid(), other.pid, flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.fixture
def stubborn(tmp_path) -> list[str]:
    script = tmp_path / "stubborn.py"
    script.write_text(textwrap.dedent(STUBBORN))
    return [sys.executable, str(script)]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.5)


def follow(command: list[str], on_line, timeout: float | None = None) -> tuple[int, list[str]]:
    with child.started(command, os.environ) as process:
        return child.follow(process, "test", on_line, timeout)


def test_a_failing_caller_leaves_nobody(stubborn):
    pids: list[int] = []

    def fail(line: str) -> None:
        pids.extend(map(int, line.split()[1:]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(stubborn, fail)
    assert len(pids) == 2 and gone(pids)


def test_a_time_limit_ends_the_group(stubborn):
    pids: list[int] = []
    with pytest.raises(ResourceError, match="limit of 3 s") as caught:
        follow(stubborn, lambda line: pids.extend(map(int, line.split()[1:])), 3)
    assert "placement.timeout_seconds" in caught.value.next
    assert len(pids) == 2 and gone(pids)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_nobody(stubborn, tmp_path, end):
    out = tmp_path / "ids"
    parent_code = f"""
        import os, sys
        from quiver.stages.common import child
        with child.started({stubborn!r}, os.environ) as process:
            child.follow(process, "test", lambda line: open({str(out)!r}, "w").write(line + chr(10)))
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(parent_code)])
    while not out.exists() or not out.read_text().endswith("\n"):
        assert parent.poll() is None
        time.sleep(0.05)
    pids = list(map(int, out.read_text().split()[1:]))
    assert all(map(alive, pids))
    parent.send_signal(end)
    parent.wait(10)
    assert gone(pids)


def test_a_grandchild_that_holds_the_pipe_is_ended(tmp_path):
    """The stage is done, something that it started is not: the caller goes on, and the other is
    killed."""
    code = """
        import subprocess, sys
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("ids", other.pid, flush=True)
    """
    script = tmp_path / "leaving.py"
    script.write_text(textwrap.dedent(code))
    pids: list[int] = []
    code, _ = follow([sys.executable, str(script)], lambda line: pids.append(int(line.split()[1])))
    assert code == 0 and gone(pids)


def test_only_the_last_state_of_a_progress_bar_is_a_line():
    code = "import sys; sys.stdout.write('10%\\r50%\\r100%\\nnext\\n\\nlast without end')"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert list(child.lines_of(other, "test", None)) == ["100%", "next", "last without end"]
    other.wait()
    other.stdout.close()


def test_a_child_that_never_stops_writing_meets_its_time_limit():
    other = subprocess.Popen(["yes", "x" * 1000], stdout=subprocess.PIPE)
    with pytest.raises(ResourceError, match="limit of 1 s"):
        for _ in child.lines_of(other, "test", 1):
            pass
    other.kill()
    other.wait()
    other.stdout.close()


def test_a_line_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(child, "_LONGEST_LINE", 1000)
    other = subprocess.Popen(
        [sys.executable, "-c", "print('a' * 10_000_000 + 'b')"], stdout=subprocess.PIPE
    )
    (line,) = child.lines_of(other, "test", None)
    assert line.endswith("b") and len(line) < 200_000
    other.wait()
    other.stdout.close()
