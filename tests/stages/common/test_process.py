"""Child processes: nobody is left behind, whatever happens to the parent, and errors keep their type."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from schemas.errors import ConfigError, ResourceError
from stages.common import process
from stages.common.process import Call, run_stage

# A child that starts a child of its own, both ignoring SIGTERM, and says both ids.
STUBBORN = """
    import os, signal, subprocess, sys, time
    from stages.common.process import watch_lifeline
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
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)


def test_a_failing_caller_leaves_nobody(stubborn):
    pids: list[int] = []

    def fail(line: str) -> None:
        pids.extend(map(int, line.split()[1:]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process._wait(stubborn, dict(os.environ), "test", None, fail)
    assert len(pids) == 2 and gone(pids)


def test_a_time_limit_ends_the_group(stubborn):
    pids: list[int] = []
    with pytest.raises(ResourceError, match="limit of 3 s") as caught:
        process._wait(stubborn, dict(os.environ), "generate", 3, lambda line: pids.extend(map(int, line.split()[1:])))
    assert "placement.timeout_seconds" in caught.value.next
    assert len(pids) == 2 and gone(pids)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_leaves_nobody(stubborn, tmp_path, end):
    out = tmp_path / "ids"
    parent_code = f"""
        import os, sys
        from stages.common import process
        process._wait({stubborn!r}, dict(os.environ), "test", None, lambda line: open({str(out)!r}, "w").write(line + chr(10)))
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
    """The stage is done, something that it started is not: the caller goes on, and the other is killed."""
    code = """
        import subprocess, sys
        other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("ids", other.pid, flush=True)
    """
    script = tmp_path / "leaving.py"
    script.write_text(textwrap.dedent(code))
    pids: list[int] = []
    code, _ = process._wait(
        [sys.executable, str(script)], dict(os.environ), "test", None, lambda x: pids.append(int(x.split()[1]))
    )
    assert code == 0 and gone(pids)


def test_an_unexpected_error_is_told_as_such(store, tmp_path):
    """Not as a dead process, and not with advice to try again."""
    spec, result = tmp_path / "spec.json", tmp_path / "result.json"
    spec.write_text(json.dumps({"stage": "policy", "config": {"model": 3}, "store": "s", "refs": {}, "into": "a"}))
    command = [sys.executable, "-m", "stages", "policy", "--spec", str(spec), "--result", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = json.loads(result.read_text())["error"]
    assert (done.returncode, error["code"], error["object"]) == (2, "E-CONFIG", "stage policy")
    spec.write_text(json.dumps({"stage": "policy", "config": {"model": "x"}, "store": str(store.path), "refs": {"x": "y"}}))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    error = json.loads(result.read_text())["error"]
    assert (done.returncode, error["code"]) == (1, "E-INTERNAL")
    assert error["message"].startswith("TypeError: ") and "Traceback" in done.stderr


def test_only_the_last_state_of_a_progress_bar_is_a_line():
    code = "import sys; sys.stdout.write('10%\\r50%\\r100%\\nnext\\n\\nlast without end')"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert list(process._lines(child, "test", None)) == ["100%", "next", "last without end"]
    child.wait()
    child.stdout.close()


def test_a_child_that_never_stops_writing_meets_its_time_limit():
    child = subprocess.Popen(["yes", "x" * 1000], stdout=subprocess.PIPE)
    with pytest.raises(ResourceError, match="limit of 1 s"):
        for _ in process._lines(child, "test", 1):
            pass
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_line_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(process, "_LONGEST_LINE", 1000)
    child = subprocess.Popen([sys.executable, "-c", "print('a' * 10_000_000 + 'b')"], stdout=subprocess.PIPE)
    (line,) = process._lines(child, "test", None)
    assert line.endswith("b") and len(line) < 200_000
    child.wait()
    child.stdout.close()


def test_a_typed_error_crosses_the_process(store, policy, monkeypatch):
    call = Call("policy", {"model": str(store.path / "nowhere")}, store.path, into="b")
    monkeypatch.setattr(process, "perform", lambda *_, **__: (_ for _ in ()).throw(process.NotDone))
    with pytest.raises(ConfigError, match="there is no such directory") as caught:
        run_stage(call)
    assert caught.value.next == "correct policy.model"


def test_a_dead_child_is_a_resource_error(store, monkeypatch):
    monkeypatch.setattr(process, "perform", lambda *_, **__: (_ for _ in ()).throw(process.NotDone))
    killer = store.path.parent / "python"
    killer.write_text("#!/bin/sh\necho about to allocate\nkill -9 $$\n")
    killer.chmod(0o755)
    call = Call("policy", {"model": "x"}, store.path, into="b")
    with pytest.raises(ResourceError, match=r"by SIGKILL \(out of memory\?\).*about to allocate"):
        run_stage(call, python=str(killer))


def test_finished_work_is_found_without_a_child(store, policy, tmp_path):
    from tests.tiny import make_folder

    call = Call("policy", {"model": str(make_folder(tmp_path / "model"))}, store.path, into="b")
    first = run_stage(call)
    assert (first.ref, first.cached) == ("b/policy@0", False)
    again = run_stage(call, python="/nonexistent")
    assert (again.ref, again.cached) == ("b/policy@0", True)
