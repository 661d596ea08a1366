"""Subprocesses: fed, limited, read, and ended with all that they started, whatever happens to
either side."""

import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from quiver.stages.core.processes import subprocesses
from quiver.stages.core.processes.subprocesses import Process, Stopped

# Starts one process in its own session and one in another; none of the three listens to SIGTERM.
STUBBORN = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    others = [subprocess.Popen(sleep, start_new_session=alone) for alone in (False, True)]
    print(os.getpid(), *(other.pid for other in others), flush=True)
"""
SLEEPS = "\ntime.sleep(600)"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(alive, pids))


def python(code: str, **options) -> Process:
    command = [sys.executable, "-u", "-c", textwrap.dedent(code)]
    return Process(command, stdout=subprocess.PIPE, **options)


def family(process: Process) -> list[int]:
    """The keeper, and the three of STUBBORN."""
    return [process.pid, *map(int, process.stdout.readline().split())]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(subprocesses, "GRACE_SECONDS", 0.5)


# -- no process is left behind


def test_a_block_that_fails_leaves_no_process():
    with pytest.raises(KeyboardInterrupt), python(textwrap.dedent(STUBBORN) + SLEEPS) as process:
        pids = family(process)
        assert len(pids) == 4 and all(map(alive, pids))
        raise KeyboardInterrupt
    assert gone(pids, 0) and process.returncode == -signal.SIGKILL


def test_a_command_that_ends_leaves_no_process():
    with python(STUBBORN) as process:
        pids = family(process)
        assert process.wait(15) == 0
        assert gone(pids, 0)


@pytest.mark.parametrize(("end", "orphan_grace"), [(signal.SIGKILL, 0), (signal.SIGTERM, 0.5)])
def test_a_parent_that_dies_leaves_no_process(end, orphan_grace):
    code = f"""
        import subprocess, sys
        from quiver.stages.core.processes.subprocesses import Process
        command = [sys.executable, "-c", {textwrap.dedent(STUBBORN) + SLEEPS!r}]
        with Process(command, stdout=subprocess.PIPE, orphan_grace={orphan_grace}) as process:
            print(process.pid, process.stdout.readline().decode(), flush=True)
            process.wait()
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    pids = list(map(int, parent.stdout.readline().split()))
    parent.stdout.close()
    assert len(pids) == 4 and all(map(alive, pids))
    parent.send_signal(end)
    parent.wait(10)
    assert gone(pids)


def test_a_parent_that_dies_may_leave_time_to_end(tmp_path):
    said = tmp_path / "said"
    command = f"""
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(open({str(said)!r}, "w").write("bye")))
        print("ready", flush=True)
        time.sleep(600)
    """
    with python(command, orphan_grace=10) as process:
        assert process.stdout.readline() == b"ready\n"
        process.kill()  # closes the lifeline, as the death of this process would
        process.wait(15)
    assert said.read_text() == "bye"


def test_sigterm_reaches_the_command_and_its_exit_code_comes_back():
    command = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
        print("ready", flush=True)
        time.sleep(600)
    """
    with python(command) as process:
        process.stdout.readline()
        assert process.end(30) == 7


def test_a_sigterm_right_after_the_start_reaches_the_command():
    """Its keeper has only begun then."""
    command = ["/bin/sh", "-c", "trap 'exit 7' TERM; kill -TERM $PPID; sleep 600 & wait"]
    for _ in range(3):
        with Process(command) as process:
            assert process.wait(15) == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGALRM, signal.SIGSEGV])
def test_it_ends_by_the_signal_that_ended_the_command(number):
    with python(f"import os; os.kill(os.getpid(), {number})") as process:
        assert process.wait(15) == -number


def test_a_command_that_stops_its_keeper_is_ended(monkeypatch):
    monkeypatch.setattr(subprocesses, "_LAST_SECONDS", 0.2)
    command = "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); print(os.getpid()); time.sleep(600)"
    with python(command) as process:
        pid = int(process.stdout.readline())
    assert gone([pid]) and process.returncode == -signal.SIGKILL


def test_a_command_that_kills_its_keeper_is_ended():
    command = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
    with python(command) as process:
        assert process.wait(15) == -signal.SIGKILL
        assert process.stdout.read() == b""  # the command's end of it is closed too


# -- fed, limited, read


def test_a_command_is_fed_and_its_lines_are_read():
    command = "import sys\nfor line in sys.stdin: print(line.upper(), end='')"
    with python(command, stdin=subprocess.PIPE) as process:
        process.stdin.write(b"one\ntwo\n")
        process.stdin.close()
        assert list(process.lines(30)) == ["ONE", "TWO"]
        assert process.wait() == 0


def test_a_limit_holds_for_the_command():
    command = (
        "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE)); bytearray(1 << 31)"
    )
    limits = {resource.RLIMIT_NOFILE: 50, resource.RLIMIT_AS: 1 << 30}
    with python(command, limits=limits, stderr=subprocess.STDOUT) as process:
        lines = list(process.lines(30))
    assert lines[0] == "50 50" and lines[-1] == "MemoryError" and process.returncode == 1


def test_the_kernel_may_be_told_to_take_the_command_and_its_children_first():
    """When memory runs out; not its keeper, which has to see to the end of all."""
    code = "import subprocess; subprocess.run(['cat', '/proc/self/oom_score_adj'])"
    keeper = "import os; print(open(f'/proc/{os.getppid()}/oom_score_adj').read())"
    before = Path("/proc/self/oom_score_adj").read_text().strip()
    with python(f"{keeper}\n{code}", oom_score=700) as process:
        assert list(process.lines(30)) == [before, "700"]


def test_a_command_that_is_not_there_is_told_at_once():
    with pytest.raises(FileNotFoundError, match="/nonexistent"):
        Process(["/nonexistent"])


def test_only_the_last_state_of_a_progress_bar_is_a_line_and_a_long_line_is_cut(monkeypatch):
    monkeypatch.setattr(subprocesses, "_LONGEST_LINE", 1000)
    code = r"print('10%\r50%\r100%\nnext\n'); print('a' * 10_000_000 + 'b', end='')"
    with python(code) as process:
        *lines, last = process.lines()
    assert lines == ["100%", "next"] and last.endswith("b") and len(last) < 200_000


@pytest.mark.parametrize("code", ["while True: print('x' * 1000)", "import time; time.sleep(600)"])
def test_a_time_limit_holds_whether_lines_come_or_not(code):
    with python(code) as process, pytest.raises(TimeoutError, match="after 1 s"):
        for _ in process.lines(1):
            pass
    assert process.returncode < 0


def test_whoever_waits_may_stop():
    asked = []
    with python("import time; time.sleep(600)") as process, pytest.raises(Stopped):
        for _ in process.lines(None, lambda: asked.append(1) or len(asked) > 2):
            pass
